"""Main loop of an engine process: one request at a time over the connection that the client handed down.

Started by `client.RolloutEngine` as `python -m jetrl_megatron.rollout.server FD PARENT`. The connection is one end of
a socket pair that nobody else can open, so both ends trust what they unpickle.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from jetrl_megatron.refit.message import RefitRefused
from jetrl_megatron.rollout.types import EngineError, GenerationRefused


def watch_parent(parent: int) -> None:
    """End this process soon after the one that started it, however that one ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        print(f"[jetrl] parent {parent} is gone, so the engine ends", file=sys.stderr, flush=True)
        os._exit(3)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def serve(connection: Connection) -> None:
    """Build the engine from the settings that come first, then answer `(method, arguments)` until `close` or EOF.

    Answers are `("ok", result)` or `("error", exception, traceback)`. What the engine refuses leaves it as it was; any
    other exception goes as an EngineError with its text and ends the process.
    """
    settings = connection.recv()
    engine = None
    try:
        from jetrl_megatron.rollout.engine import Engine

        engine = Engine(settings)
        connection.send(("ok", engine.facts()))
    except BaseException as error:
        connection.send(_failure(error))
        raise
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        if method == "close":
            connection.send(("ok", None))
            return
        try:
            connection.send(("ok", getattr(engine, method)(*arguments)))
        except (RefitRefused, GenerationRefused) as refused:
            connection.send(_failure(refused))
        except BaseException as error:
            # vLLM may be left with half-done requests: nothing that it says from here on would be worth much.
            connection.send(_failure(error))
            raise


def _failure(error: BaseException) -> tuple[str, Exception, str]:
    refused = isinstance(error, (RefitRefused, GenerationRefused))
    text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    sent = error if refused else EngineError(text)
    return "error", sent, "".join(traceback.format_exception(error))


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(fd, False)
    watch_parent(parent)
    code = 0
    try:
        serve(Connection(fd))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's and torch's exit handlers can hang for seconds; nothing here needs them.
    os._exit(code)


if __name__ == "__main__":
    main()
