"""Engines of other nodes, as the first trainer rank sees them: it listens, each node's agent connects to it.

An agent (`agent.py`) opens one connection for each of its engines and, on a node without trainers, one for its host
process. Both sides prove that they know a key that only this run's processes can read, before anything is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NamedTuple

from jetrl_megatron.config import Config
from jetrl_megatron.errors import RunError
from jetrl_megatron.refit.message import RefitMessage
from jetrl_megatron.rollout.types import Completion, EngineDied, EngineFacts, Sampling

HELLO_S = 10
"""Longest wait for a word of a connection that has just been opened."""
LOST_S = 30
"""A node that answers nothing for so long, not even its kernel, is gone."""
MARGIN_S = 30.0
"""An agent's own time-outs end before those of its caller."""
FILE = ".agents.json"
"""In the run's folder, readable by its owner: address and key for nodes without trainers."""
log = logging.getLogger(__name__)


class Address(NamedTuple):
    host: str
    port: int
    key: bytes

    @staticmethod
    def read(output: Path) -> Address:
        host, port, key = json.loads((output / FILE).read_text())
        return Address(host, port, bytes.fromhex(key))


Name = tuple[str, int]
"""("engine", replica) or ("host", member)."""


def dial(address: Address, name: Name) -> Connection:
    """Connect as `name`. Raises OSError, EOFError or AuthenticationError when that does not work (yet)."""
    link = socket.create_connection((address.host, address.port), timeout=HELLO_S)
    connection = _wrap(link)
    try:
        answer_challenge(connection, address.key)
        deliver_challenge(connection, address.key)
        connection.send(name)
    except BaseException:
        connection.close()
        raise
    _timeout(connection, 0)
    return connection


class Hub:
    """Listens for agents. `host` is the name under which other nodes reach this one."""

    def __init__(self, host: str):
        self._socket = socket.create_server(("", 0), backlog=64)
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(32))
        self._known: dict[Name, Connection] = {}
        self._published: Path | None = None
        self._news = threading.Condition()
        threading.Thread(target=self._listen, name="agents", daemon=True).start()

    def publish(self, output: Path) -> None:
        """Write address and key into the run's folder, for nodes without trainers; `close` removes them."""
        part, self._published = output / f"{FILE}.{os.getpid()}", output / FILE
        host, port, key = self.address
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump([host, port, key.hex()], file)
        part.rename(self._published)

    def take(self, name: Name, timeout: float) -> Connection | None:
        """The newest connection of this name that has not been taken; None if none comes in time."""
        with self._news:
            self._news.wait_for(lambda: name in self._known, timeout)
            return self._known.pop(name, None)

    def close(self) -> None:
        if self._published is not None:
            self._published.unlink(missing_ok=True)
        self._socket.close()
        for connection in self._known.values():
            connection.close()

    def _listen(self) -> None:
        while True:
            try:
                link, peer = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._welcome, args=(link, peer), daemon=True).start()

    def _welcome(self, link: socket.socket, peer: Any) -> None:
        connection = _wrap(link)
        try:
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            name = connection.recv()
            _timeout(connection, 0)
        except Exception as error:  # whoever it was knows no key
            log.warning("a connection from %s was refused: %s", peer[0], error)
            connection.close()
            return
        with self._news:
            self._known[name] = connection
            self._news.notify_all()


def _wrap(link: socket.socket) -> Connection:
    """A connection that notices within LOST_S when the other node is gone without a word."""
    for option, value in (
        (socket.TCP_KEEPIDLE, LOST_S // 3),
        (socket.TCP_KEEPINTVL, LOST_S // 6),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, LOST_S * 1000),
        (socket.TCP_NODELAY, 1),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setblocking(True)
    connection = Connection(link.detach())
    _timeout(connection, HELLO_S)
    return connection


def _timeout(connection: Connection, seconds: int) -> None:
    """Longest wait of one read; 0: none."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


class Remote:
    """Something on another node that answers one request at a time."""

    def __init__(self, name: Name, node: int, hub: Hub, start_timeout_s: float):
        self.name, self.node, self.hub, self.start_timeout_s = name, node, hub, start_timeout_s
        self.connection: Connection | None = None
        self.taken = 0
        """Connections so far: whoever lost one comes back as another process."""

    def begin(self, method: str, *arguments: Any) -> None:
        """Send a request; `finish` waits for its answer."""
        if self.connection is None:
            self._take(self.start_timeout_s)
        if self.connection is None:
            raise self._gone(f"did not connect in {self.start_timeout_s:.0f} s")
        try:
            self.connection.send((method, arguments))
        except OSError as error:
            raise self._gone(f"is gone before {method} ({error})") from None

    def finish(self, doing: str, timeout: float) -> Any:
        """
        Raises:
            EngineDied: no answer in time, or the connection broke. Else what the other side raised.
        """
        if self.connection is None:
            raise self._gone("is not connected")
        try:
            if not self.connection.poll(timeout):
                raise self._gone(f"took longer than {timeout:.0f} s to {doing}")
            status, value = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone(f"is gone while asked to {doing} ({type(error).__name__})") from None
        if status == "error":
            raise value
        return value

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        self.begin(method, *arguments)
        return self.finish(method, timeout)

    def reconnect(self) -> bool:
        """Take a newer connection if one has come; whether there is a connection now."""
        self._take(0)
        return self.connection is not None

    def _take(self, timeout: float) -> None:
        newer = self.hub.take(self.name, timeout)
        if newer is not None:
            self.drop()
            self.connection, self.taken = newer, self.taken + 1

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _gone(self, how: str) -> EngineDied:
        self.drop()
        return EngineDied(f"{' '.join(map(str, self.name))} on node {self.node} {how}")


class RemoteEngine:
    """A replica on another node: `client.RolloutEngine` by wire; that engine's agent starts it."""

    def __init__(self, replica: int, node: int, hub: Hub, config: Config):
        self.replica, self.node, self.config = replica, node, config
        rollout = config.rollout
        self._remote = Remote(("engine", replica), node, hub, rollout.start_timeout_s)
        self._ready = False

    def start(self) -> None:
        """Nothing to do: the agent has started it."""

    def wait_ready(self) -> EngineFacts:
        facts = self._remote.call("wait_ready", timeout=self.config.rollout.start_timeout_s + MARGIN_S)
        self._ready = True
        return facts

    def expose(self, message: RefitMessage) -> list[str]:
        return self._call("expose", message)

    def refit(self, message: RefitMessage, hold: bool = False) -> dict[str, int]:
        return self._call("refit", message, hold)

    def accept(self) -> None:
        self._call("accept")

    def generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Completion]:
        return self._call("generate", prompts, seeds, sampling)

    def sleep(self) -> None:
        self._call("sleep")

    def restart(self) -> None:
        """Replace the engine's process, or turn to the agent that has taken its former agent's place.

        Raises:
            EngineDied: no agent is connected.
        """
        self._ready = False
        before = self._remote.connection
        if not self._remote.reconnect():
            raise EngineDied(f"engine {self.replica} on node {self._remote.node}: its agent is gone")
        if self._remote.connection is before:  # a new agent has just started a new engine
            self._call("restart")

    def close(self) -> None:
        with contextlib.suppress(RunError, OSError):
            if self._remote.reconnect():
                self._remote.call("close", timeout=MARGIN_S)
        self._remote.drop()

    def _call(self, method: str, *arguments: Any) -> Any:
        if not self._ready and method != "restart":
            self.wait_ready()
        return self._remote.call(method, *arguments, timeout=self.config.rollout.call_timeout_s + MARGIN_S)


class RemoteHost:
    """A host process of a node without trainers: a receiver of that node's copy."""

    def __init__(self, member: int, node: int, hub: Hub, config: Config):
        self.timeout_s = config.refit.timeout_s + MARGIN_S
        self._remote = Remote(("host", member), node, hub, config.rollout.start_timeout_s)
        self._lost = False

    @property
    def node(self) -> int:
        return self._remote.node

    @property
    def process(self) -> int:
        """Which of the processes that have been this host it is now."""
        return self._remote.taken

    def segments(self) -> dict[int, str] | None:
        """Its landing places by destination rank, or None if it is not there (any more)."""
        try:
            self._remote.reconnect()
            held = self._remote.call("segments", timeout=LOST_S)
            self._lost = False
            return held
        except EngineDied as error:
            if not self._lost:  # asked before every chunk
                log.warning("%s", error)
            self._lost = True
            return None
        finally:
            self._remote.start_timeout_s = 0.0  # it had its time; from now on it is there or it is not

    def release(self) -> None:
        """See `host.Host.release`. A host that is gone has nothing mapped."""
        with contextlib.suppress(EngineDied):
            if self._remote.connection is not None:
                self._remote.call("release", timeout=LOST_S)

    def begin(self, method: str, *arguments: Any) -> None:
        self._remote.begin(method, *arguments)

    def finish(self, doing: str) -> Any:
        return self._remote.finish(doing, self.timeout_s)

    def close(self) -> None:
        with contextlib.suppress(RunError, OSError):
            if self._remote.reconnect():
                self._remote.call("close", timeout=LOST_S)
        self._remote.drop()
