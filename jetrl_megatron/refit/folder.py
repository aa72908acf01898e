"""Bring engines to the weights of a Hugging Face folder, without a trainer: for evaluation of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from jetrl_conversion.layout import Layout
from jetrl_conversion.planner import plan_reshard
from jetrl_conversion.safetensors_io import HFFolderReader
from jetrl_kernels.quant_weight import quant_weight
from jetrl_megatron.config import Config
from jetrl_megatron.layouts import fp8_tensors, rollout_layout
from jetrl_megatron.refit.digests import rank_digests
from jetrl_megatron.refit.message import SCALE_SUFFIX, RefitMessage, plan_slots, segment_bytes
from jetrl_megatron.refit.rectangles import pairs
from jetrl_megatron.refit.shm import Segment
from jetrl_megatron.rollout.pool import EnginePool


@contextmanager
def loaded_engines(folder: Path, config: Config, output: Path) -> Iterator[EnginePool]:
    """Engines of this config holding the folder's weights, quantized as a trainer would; closed at the end.

    Args:
        folder: Hugging Face folder, any float type; rounded to BF16 before it is quantized.
        output: where the engines' logs go.

    Raises:
        CheckpointError: tensors missing, extra or of another shape. RefitMismatch: see `EnginePool.load`.
    """
    reader = HFFolderReader(folder)
    spec, target = reader.spec(), rollout_layout(config)
    reader.check({name: info.shape for name, info in spec.tensors().items()})
    # The trainer's layout decides with the engine's which tensors are FP8, so that this measures the trained policy.
    fp8 = fp8_tensors(spec, config) if config.precision.mode != "bf16" else set()
    pool = EnginePool.of(folder, config, fp8, output, torch.device("cpu"))
    slots = [plan_slots(spec, target, rank, fp8) for rank in range(target.world)]
    by_name = [{slot.name: slot for slot in rank} for rank in slots]
    segments: list[Segment] = []
    try:
        pool.start()
        segments += [Segment.create(segment_bytes(rank), f"folder{n}") for n, rank in enumerate(slots)]
        weights: dict[str, Tensor] = {}
        for name in spec.tensors():
            whole = reader.whole(name).to(torch.bfloat16)
            weights[name] = whole
            if name in fp8:
                quantized = quant_weight(whole, config.precision.scales)
                weights[name], weights[name + SCALE_SUFFIX] = quantized.codes, quantized.scale
        keep = [name for name, info in spec.tensors().items() if info.quantized and name not in fp8]
        for transfer in plan_reshard(spec, Layout("hf"), target, fp8=bool(fp8), keep_bf16=keep).transfers:
            for source, place in pairs(transfer, weights, lambda rank, n: segments[rank].view(by_name[rank][n])):
                place.copy_(source)
        message = RefitMessage(
            version=0,
            scales=config.precision.scales if fp8 else "none",
            segments=tuple(str(s.path) for s in segments),
            slots=tuple(slots),
        )
        pool.load(message, rank_digests(spec, Layout("hf"), 0, weights))
        yield pool
    finally:
        pool.close()
        for segment in segments:
            segment.unlink()
