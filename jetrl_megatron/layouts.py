"""How a run's parameters lie over trainer and rollout ranks. Free of torch: used for checks before anything starts."""

from __future__ import annotations

from jetrl_conversion.layout import Layout
from jetrl_conversion.model_spec import ModelSpec
from jetrl_conversion.planner import quantized_tensors
from jetrl_megatron.config import Config


def trainer_layout(config: Config) -> Layout:
    """The trainer's layout; its ranks are torchrun's global ranks.

    Megatron takes expert parallel ranks from the data and context parallel ones, and cuts each expert over `tp`.
    Where `ep` does not divide `dp x cp` the layout has another number of ranks than the world.
    """
    p = config.parallel
    return Layout("megatron", tp=p.tp, pp=p.pp, ep=p.ep, dp=max(1, p.dp * p.cp // p.ep))


def rollout_layout(config: Config) -> Layout:
    """The layout of one rollout replica."""
    return Layout("vllm", tp=config.rollout.tp)


def fp8_tensors(spec: ModelSpec, config: Config) -> set[str]:
    """Hugging Face names of the tensors that both sides hold as FP8 tiles under this config's layouts.

    A tensor whose tiles either layout would cut stays BF16 on both sides.
    """
    return quantized_tensors(spec, trainer_layout(config), rollout_layout(config))
