"""The trainer's handle on one engine: starts its process, sends requests, and notices at once when it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jetrl_conversion.layout import Layout
from jetrl_conversion.model_spec import load_model_spec
from jetrl_megatron import signals
from jetrl_megatron.config import Config
from jetrl_megatron.refit.message import SCALE_SUFFIX, RefitMessage, plan_slots
from jetrl_megatron.refit.shm import remove_stale
from jetrl_megatron.rollout.environment import engine_environment
from jetrl_megatron.rollout.types import (
    Completion,
    EngineDied,
    EngineError,
    EngineFacts,
    EngineSettings,
    Sampling,
)

LOG_LINES = 20
"""Lines of the engine's log that an EngineDied quotes."""


def engine_settings(
    model_dir: str | Path, config: Config, quantized: Collection[str], *, cpu: bool, worker_extension: str | None = None
) -> EngineSettings:
    """Settings of one replica.

    Args:
        quantized: Hugging Face names of the tensors that are FP8 in the engine; ignored in mode `bf16`.
        worker_extension: another class than ours for vLLM's `worker_extension_cls`, derived from it.

    Raises:
        LayoutError: the model cannot be laid out over `rollout.tp` ranks.
        ValueError: only a part of a fused parameter is FP8.
    """
    rollout, fp8 = config.rollout, config.precision.mode != "bf16"
    spec = load_model_spec(model_dir)
    layout = Layout("vllm", tp=rollout.tp)
    slots = plan_slots(spec, layout, 0, quantized if fp8 else ())
    modules = tuple(s.name.removesuffix(".weight" + SCALE_SUFFIX) for s in slots if s.name.endswith(SCALE_SUFFIX))
    settings = EngineSettings(
        model_dir=str(model_dir),
        modules=modules,
        scales=config.precision.scales if modules else "none",
        tp=rollout.tp,
        max_length=config.model.max_length,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        kv_bytes=int(rollout.memory_gib * 2**30),
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        cpu=cpu,
        sleep=rollout.colocated and not rollout.nodes and not cpu,
    )
    return (
        settings
        if worker_extension is None
        else EngineSettings(**{**vars(settings), "worker_extension": worker_extension})
    )


class RolloutEngine:
    """One rollout replica. Not thread-safe: one request at a time.

    `start` returns at once; the first request (or `wait_ready`) waits until the engine is up, so that an engine can
    start while the trainer does. Every wait ends at `rollout.start_timeout_s` or `rollout.call_timeout_s`.

    Args:
        model_dir: folder with config.json; weights in it are never read.
        config: the run's configuration.
        quantized: Hugging Face names of the FP8 tensors (`jetrl_conversion.planner.quantized_tensors`).
        output: the run's folder; the engine's log is `engine-REPLICA.log` in it, appended to.
        replica: number of this replica.
        devices: CUDA devices of this replica; None (and no CUDA) is the CPU.
        cpu: run on the CPU.
        worker_extension: see `engine_settings`.
    """

    def __init__(
        self,
        model_dir: str | Path,
        config: Config,
        *,
        quantized: Collection[str],
        output: Path,
        replica: int = 0,
        cpu: bool = True,
        devices: Sequence[int | str] | None = None,
        worker_extension: str | None = None,
    ):
        self.settings = engine_settings(model_dir, config, quantized, cpu=cpu, worker_extension=worker_extension)
        self.config = config
        self.replica = replica
        self.log = Path(output) / f"engine-{replica}.log"
        self.devices = devices
        self.facts: EngineFacts | None = None
        self.version: int | None = None
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._log_start = 0

    def start(self) -> None:
        """Start the engine's process and return."""
        if self._process is not None:
            raise EngineError(f"engine {self.replica} has been started already")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        env = engine_environment(self.config.rollout.threads, cpu=self.settings.cpu, devices=self.devices)
        with theirs, self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jetrl_megatron.rollout.server", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=[theirs.fileno()],
                # Ctrl-C in a terminal goes to the trainer, which closes its engines.
                start_new_session=True,
                # Slurm signals every process of a task: the engine must live until the trainer has saved.
                preexec_fn=signals.ignore,
            )
        self._connection = Connection(ours.detach())
        self._connection.send(self.settings)

    def wait_ready(self) -> EngineFacts:
        """Wait until the engine is up.

        Raises:
            EngineError: it could not be built, or computes differently than the trainer.
            EngineDied: it ended, or was not up in `rollout.start_timeout_s`.
        """
        facts = self.facts
        if facts is None:
            try:
                facts = self._receive(self.config.rollout.start_timeout_s, "starting")
            except EngineError:
                self._kill()
                raise
            problems = self.differences(facts)
            if problems:
                self._kill()
                raise EngineError(
                    f"engine {self.replica} and trainer would compute differently: " + "; ".join(problems)
                )
            self.facts = facts
        return facts

    def differences(self, facts: EngineFacts) -> list[str]:
        """Where a CPU engine's operations are not those that the trainer takes from `jetrl_megatron.engine_ops`."""
        if not self.settings.cpu:
            return []
        from jetrl_kernels.digest import digest
        from jetrl_megatron.engine_ops import ATTENTION_BLOCK, Rope, attention_isa

        spec = load_model_spec(self.settings.model_dir)
        expected = {
            "attention_isa": attention_isa(spec.head_dim),
            "attention_block": ATTENTION_BLOCK,
            "rope_digest": digest(Rope.from_hf_config(spec.config).table()),
        }
        return [
            f"{name} is {getattr(facts, name)} in the engine and {ours} in the trainer"
            for name, ours in expected.items()
            if getattr(facts, name) != ours
        ]

    def refit(self, message: RefitMessage, hold: bool = False) -> dict[str, int]:
        """Load one chunk of a version of the weights.

        Args:
            hold: serve nothing until `accept`, which the caller calls when it has compared the digests.

        Returns:
            After the last chunk: digests of the engine's live parameters by Hugging Face name
            (`jetrl_megatron.refit.digests`); before it: an empty dict.

        Raises:
            RefitRefused: with every problem of the message; the engine's memory is unchanged.
            EngineError, EngineDied: see `generate`.
        """
        digests = self._call("refit", message.to_dict(), hold)
        if digests:
            self.version = message.version
        return digests

    def expose(self, message: RefitMessage) -> list[str]:
        """Let receivers of this node write a version into the engine's parameters; then `refit` with the same message.

        Returns:
            Each worker's table of its parameters (`jetrl_megatron.refit.ipc`).

        Raises:
            RefitRefused, EngineError, EngineDied: see `refit`.
        """
        self.version = None
        return self._call("expose", message.to_dict())

    def accept(self) -> None:
        """Serve the version that the last `refit` held back."""
        self._call("accept")

    def generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Completion]:
        """One answer to each prompt, in order; repeat a prompt for a group.

        An answer depends on its prompt and seed, on sampling and on the weights, not on the rest of the batch.

        Raises:
            GenerationRefused: before the first refit, or a request that does not fit.
            EngineError: the engine failed but lives. EngineDied: its process is gone or did not answer in time.
        """
        return self._call("generate", prompts, seeds, sampling)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of every token but the first of given sequences, by prefill (temperature 1).

        Raises:
            GenerationRefused, EngineError, EngineDied: as `generate`.
        """
        return self._call("score", sequences)

    def sleep(self) -> None:
        """Free the GPU's memory, weights included; the next `refit` wakes the engine. Nothing happens on a CPU."""
        self._call("sleep")
        if self.settings.sleep:
            self.version = None

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Result of a method of the worker extension (`settings.worker_extension`), from every worker of the engine."""
        return self._call("call_workers", method, *arguments)

    def restart(self) -> None:
        """Replace the process by a fresh one, which holds no weights: refit it before the next `generate`."""
        self._kill()
        self.start()

    def close(self) -> None:
        """End the engine's process. Safe to call again."""
        if self._process is not None and self._connection is not None and self.alive and self.facts is not None:
            try:
                self._connection.send(("close", ()))
                self._process.wait(10)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self._kill()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def __enter__(self) -> RolloutEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._process is None:
            raise EngineError(f"engine {self.replica} has not been started")
        self.wait_ready()
        assert self._connection is not None
        try:
            self._connection.send((method, arguments))
        except OSError:
            raise self._death(f"before {method}") from None
        return self._receive(self.config.rollout.call_timeout_s, method)

    def _receive(self, timeout: float, doing: str) -> Any:
        """The answer to the last request. The connection breaks the moment the process dies, so nothing hangs."""
        assert self._connection is not None
        deadline = time.monotonic() + timeout
        try:
            # In short waits: a helper process of the engine may hold the connection's other end open.
            while not self._connection.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
                if not self.alive:
                    raise self._death(f"while {doing}")
                if time.monotonic() >= deadline:
                    self._kill()
                    raise self._death(f"killed: {doing} took longer than {timeout:.0f} s")
            status, value, *details = self._connection.recv()
        except (EOFError, OSError):
            raise self._death(f"while {doing}") from None
        if status == "error":
            value.add_note(f"in engine {self.replica} (log: {self.log}):\n{details[0]}")
            raise value
        return value

    def _death(self, when: str) -> EngineDied:
        code: int | None = None
        if self._process is not None:
            try:
                code = self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._kill()
                when += ", connection lost"
        self.version = None
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return EngineDied(f"engine {self.replica} died {when} ({how}); last lines of {self.log}:\n{self._tail()}")

    def _tail(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def _kill(self) -> None:
        """End the process and everything it started: they share a session of their own."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            remove_stale()  # the table of its parameters
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = self.facts = self.version = None
