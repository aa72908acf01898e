"""The training loop: refit, sample, score, update. One screen; everything it calls has one job."""

from __future__ import annotations

from pathlib import Path

from jetrl_megatron import signals
from jetrl_megatron.config import Config
from jetrl_megatron.run import Run


def train(config: Config, output: Path) -> int:
    """Run GRPO on this rank until `train.steps`, from the last complete checkpoint in `output` if there is one.

    Returns:
        0 when all steps are done, `signals.REQUEUE_EXIT_CODE` when asked to stop before that (state is saved).
    """
    run = Run(config, output)
    with run:
        for step in range(run.first_step, config.train.steps):
            with run.phase("refit"):
                refit = run.refit()
            with run.phase("rollout"):
                samples = run.sample(step)
            with run.phase("train"):
                update = run.update(samples)
            with run.phase("eval"):
                evaluation = run.evaluate() if run.due(config.train.eval_every, step) else {}
            run.log(step, samples, refit, update, evaluation)
            stop = run.stop_requested()
            if stop or run.checkpoint_due(step):
                run.save(step + 1)
            if stop:
                return signals.REQUEUE_EXIT_CODE
    return 0
