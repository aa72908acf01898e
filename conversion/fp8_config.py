"""config.json and model card of a block-FP8 folder, as stock vLLM and stock transformers read them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jetrl_conversion.model_spec import ModelSpec
from jetrl_conversion.parallel import Layout
from jetrl_conversion.tiles import violations
from jetrl_kernels.formats import BLOCK


def unconverted_modules(spec: ModelSpec, fp8: Iterable[str]) -> list[str]:
    """Names of the linear modules that stay BF16: lm_head, routers, and projections that are not in `fp8`."""
    held = set(fp8)
    linear = [name for name, info in spec.tensors().items() if info.quantized or name.endswith("mlp.gate.weight")]
    # A tied model has no lm_head tensor, but transformers still has the module.
    return ["lm_head", *(name.removesuffix(".weight") for name in linear if name not in held)]


def make_config(spec: ModelSpec, fp8: Iterable[str], scales: str) -> dict[str, Any]:
    """The source's config.json with `quantization_config`, and our own record of the scale policy under `jetrl`."""
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": unconverted_modules(spec, fp8),
    }
    return spec.config | {"quantization_config": quantization, "jetrl": {"scale_policy": scales}}


_POLICY = {
    "pow2": "powers of two, rounded up (`pow2`): dequantized values are exact in BF16",
    "fp32": "plain `amax / 448` in FP32 (`fp32`)",
}


def make_card(spec: ModelSpec, fp8: Iterable[str], scales: str, layouts: Iterable[Layout], name: str) -> str:
    """README.md of the folder: what is FP8, with which scales, what vLLM does with them, and what stayed BF16."""
    held = set(fp8)
    kept = [n for n, info in spec.tensors().items() if info.quantized and n not in held]
    reasons = dict.fromkeys(f"- {v}" for v in violations(spec, *layouts) if not v.fatal)
    lines = [
        f"# {name}",
        "",
        f"Block-FP8 (E4M3) weights of a {spec.architecture} model: one FP32 scale for each {BLOCK} x {BLOCK} tile,",
        f"`value = code * scale`, stored as `X.weight` and `X.weight_scale_inv`. Scale policy: {_POLICY[scales]}.",
        f"{len(held)} tensors are FP8; embedding, lm_head, norms, routers and biases are as in the source.",
        "",
        "Loads in stock vLLM and in stock transformers (there dequantized where FP8 has no kernel), without a plugin.",
        "",
        "## What vLLM does to the scales on load",
        "",
        "Where DeepGEMM is used with `VLLM_USE_DEEP_GEMM_E8M0=1`, vLLM *requantizes* the weights after loading to",
        "power-of-two scales. Under `pow2` the values stay the same, but codes and scales of some tiles change (those",
        "whose largest code is 224 or less); under `fp32` the values change too. Set `VLLM_USE_DEEP_GEMM_E8M0=0` to",
        "run the bytes of this folder.",
    ]
    if kept:
        patterns = sorted({re.sub(r"\.\d+\.", ".*.", n) for n in kept})
        lines += ["", "## Kept in BF16", "", *(f"- `{p}`" for p in patterns), *(["", *reasons] if reasons else [])]
    return "\n".join(lines) + "\n"
