"""Training steps of one rank: padding, recompute, FP8 weights without BF16 copies, Transformer Engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_support import batches_of, engine_for, loss, needs_hopper, random_samples, step, trainer_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300), needs_hopper]

BACKENDS = ["jetrl", "te"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from jetrl_megatron.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"), 7, heads=4, kv_heads=2, hidden=512, ffn=1024)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packing_and_padding_leave_log_probs_unchanged(model: Path, backend: str) -> None:
    """Sequences alone, packed together, and with a long padded tail: the same bits for every real token."""
    with trainer_of(model, f"precision.linear_backend={backend}") as trainer:
        samples = random_samples(6, trainer.spec.vocab_size)

        def scores(size: int, multiple: int) -> torch.Tensor:
            batches = batches_of(trainer, samples, size, multiple)
            return torch.cat([logp[b.mask] for logp, b in zip(trainer.logprobs(batches), batches)])

        packed = scores(6, 128)
        assert packed.numel() == sum(len(s.response_ids) for s in samples)
        assert torch.equal(scores(6, 4096), packed)
        assert torch.equal(scores(1, 128), packed)


def _gradients(trainer, batches: list) -> dict[str, torch.Tensor]:
    trainer.model.zero_grad_buffer()
    trainer._run(batches, loss)
    return {name: p.main_grad.clone() for name, p in trainer.parameters().items()}


def _difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of a parameter's gradient, in the Frobenius norm."""
    assert all(float(g.norm()) > 0 for g in first.values())
    return max(float((second[name] - g).norm() / g.norm()) for name, g in first.items())


@pytest.mark.parametrize("mode", ["jetrl", "bf16"])
def test_recompute_gives_the_same_gradients(model: Path, mode: str) -> None:
    found = []
    for recompute in ("false", "false", "true"):
        with trainer_of(model, f"precision.mode={mode}", f"model.recompute={recompute}") as trainer:
            batches = batches_of(trainer, random_samples(8, trainer.spec.vocab_size), 4)
            found.append(_gradients(trainer, batches))
    # FlashAttention's backward adds in no fixed order, so that two equal runs differ a little, too.
    noise = _difference(found[0], found[1])
    assert _difference(found[0], found[2]) <= max(3 * noise, 1e-3)


def test_recompute_needs_less_memory(model: Path) -> None:
    peaks = []
    for recompute in ("false", "true"):
        with trainer_of(model, f"model.recompute={recompute}") as trainer:
            batches = batches_of(trainer, random_samples(64, trainer.spec.vocab_size), 64)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            trainer._run(batches, loss)
            peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_alone_trains_like_fp8_beside_bf16(model: Path, backend: str) -> None:
    losses = []
    for fp8_param in ("false", "true"):
        with trainer_of(model, f"precision.linear_backend={backend}", f"precision.fp8_param={fp8_param}") as trainer:
            batches = batches_of(trainer, random_samples(8, trainer.spec.vocab_size), 4)
            losses.append([step(trainer, batches) for _ in range(3)])
    assert losses[0][0] == losses[1][0], "before the first update everything is the same bits"
    assert losses[1] == pytest.approx(losses[0], rel=1e-2, abs=1e-3)
    assert losses[1][2] < losses[1][0]


def test_fp8_alone_peaks_below_bf16(tmp_path: Path) -> None:
    from jetrl_megatron.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path, 1, hidden=1024, heads=8, kv_heads=2, ffn=4096, layers=6)
    peaks = {}
    for name, overrides in {
        "bf16": ["precision.mode=bf16"],
        "fp8": [],
        "fp8_param": ["precision.fp8_param=true"],
    }.items():
        with trainer_of(folder, *overrides) as trainer:
            batches = batches_of(trainer, random_samples(48, trainer.spec.vocab_size), 24)
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                step(trainer, batches)
            peaks[name] = torch.cuda.max_memory_allocated() / 2**20
    print({name: f"{peak:.0f} MiB" for name, peak in peaks.items()})
    assert peaks["fp8_param"] < peaks["bf16"]
    assert peaks["fp8_param"] < peaks["fp8"] - 0.9 * 2 * 16e6 * 6 / 2**20, "the BF16 weights of six layers"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_in_a_weight_is_named(model: Path, backend: str) -> None:
    from jetrl_megatron.megatron.trainer import NonFiniteError

    with trainer_of(model, f"precision.linear_backend={backend}", "precision.fp8_param=true") as trainer:
        batches = batches_of(trainer, random_samples(4, trainer.spec.vocab_size), 4)
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        trainer.parameters()[name].main_param.data.view(-1)[5] = float("nan")  # type: ignore[attr-defined]
        with pytest.raises(NonFiniteError, match=name):
            step(trainer, batches)


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_steps_with_the_engine_at_the_same_bytes(model: Path, backend: str, tmp_path: Path) -> None:
    """Each refit compares the digests of what the trainer's next forward reads with the engine's live parameters."""
    overrides = [f"precision.linear_backend={backend}", "rollout.enforce_eager=true", "rollout.colocated=false"]
    with trainer_of(model, *overrides) as trainer, engine_for(trainer, model, tmp_path) as (_, sender):
        batches = batches_of(trainer, random_samples(8, trainer.spec.vocab_size), 4)
        tensors = sender.send().tensors
        losses = []
        for number in range(3):
            losses.append(step(trainer, batches))
            report = sender.send()
            assert (report.version, report.tensors, report.mismatched) == (number + 1, tensors, 0)
    assert losses[2] < losses[0]
