"""What torchrun starts on every rank: `python -m jetrl_megatron.worker TASK OUTPUT`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path

from torch import multiprocessing
from torch.distributed.elastic.multiprocessing.errors import record

from jetrl_megatron import signals
from jetrl_megatron.config import Config


def quiet() -> None:
    """Megatron's advice about deprecated classes, missing packages and asynchronous saves is not for the user."""
    warnings.filterwarnings("ignore", module=r"megatron.*|torch\.distributed\.checkpoint.*")
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


@record
def main(task: str, output: Path) -> int:
    signals.install()
    # A launcher that is killed leaves no ranks behind that would go on training (and writing) on their own.
    multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    quiet()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    config = Config.from_dict(json.loads((output / "config.json").read_text()))
    from jetrl_megatron.megatron import world

    world.initialize(config)
    try:
        if task == "train":
            from jetrl_megatron.train import train as run
        elif task == "sft":
            from jetrl_megatron.sft import sft as run
        else:
            raise ValueError(f"unknown task {task!r}")
        code = run(config, output)
    finally:
        # A rank that failed must not wait for the others at the barrier inside.
        if sys.exc_info()[0] is None:
            world.shutdown()
    return code


if __name__ == "__main__":
    status = main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo and of libraries may still run; nothing is left to be saved.
    os._exit(status)
