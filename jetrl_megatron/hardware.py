"""What the estimates assume about the machines. Peaks are the vendor's dense figures, rates are measured here."""

from __future__ import annotations

from dataclasses import dataclass

from jetrl_megatron.config import ConfigError, nearest

GIB = float(1 << 30)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in a node of eight. Rates per GPU, in bytes/s and FLOP/s."""

    name: str
    memory: float
    """Bytes that a process can use."""
    peak_bf16: float
    peak_fp8: float
    bandwidth: float
    link: float
    """NVLink, one direction."""
    network: float
    """Between nodes, one direction: one 400 Gbit/s adapter each."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="h100", memory=79.1 * GIB, peak_bf16=989e12, peak_fp8=1979e12, bandwidth=3.35e12, link=450e9,
            network=50e9),
        Gpu(name="h200", memory=139.8 * GIB, peak_bf16=989e12, peak_fp8=1979e12, bandwidth=4.8e12, link=450e9,
            network=50e9),
    )
}  # fmt: skip
GPUS_PER_NODE = 8


def gpu(name: str) -> Gpu:
    """Raises ConfigError naming the nearest known GPU."""
    if name.lower() not in GPUS:
        raise ConfigError([f"GPU {name!r} is not in the table, {nearest(name.lower(), GPUS)}"])
    return GPUS[name.lower()]
