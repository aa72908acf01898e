"""`jetrl bench step`: recipes are compared only when they did the same work."""

from __future__ import annotations

import pytest
import torch

from jetrl_megatron.commands.bench_step import PHASES, STILL, _compare
from jetrl_megatron.config import Config, apply_overrides


def result(recipe: str, seconds: float, length: float) -> dict:
    return {"recipe": recipe, **dict.fromkeys((*PHASES, "step_seconds"), seconds), "response_length_mean": length}


@pytest.mark.parametrize(("length", "compared"), [(500.0, True), (480.0, True), (470.0, False), (530.0, False)])
def test_times_of_answers_that_differ_in_length_are_not_compared(length: float, compared: bool, capsys) -> None:
    assert _compare(result("ours", 2.0, 500.0), result("bf16", 3.0, length)) is compared
    said = capsys.readouterr().out
    assert ("step_seconds 1.500" in said) is compared
    assert f"{length} and 500.0 tokens" in said


def test_the_step_of_a_fixed_workload_moves_no_master_of_a_random_weight() -> None:
    lr = apply_overrides(Config(), [STILL]).optimizer.lr
    before = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16().float()
    master = before.clone().requires_grad_()
    optimizer = torch.optim.AdamW([master], lr=lr, weight_decay=0.1)
    for seed in range(3):
        master.grad = torch.randn(before.shape, generator=torch.Generator().manual_seed(seed)).mul(1e-3)
        optimizer.step()
    assert torch.equal(master, before)
