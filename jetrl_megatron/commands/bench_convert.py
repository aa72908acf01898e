"""`jetrl bench convert`: time and memory of hf-to-fp8 beside `cp -r` of the same checkpoint."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer


def convert(
    gb: Annotated[float, typer.Option(help="Size of the generated BF16 checkpoint.")] = 4.0,
    scales: Annotated[str, typer.Option(help="pow2 or fp32.")] = "pow2",
    folder: Annotated[Path | None, typer.Option(help="Where to work; needs 2.6 times the size. Emptied after.")] = None,
) -> None:
    """Generate a checkpoint, copy it, convert it to FP8, and print times, rates and peak memory.

    The target: at most 1.5 times `cp -r` plus the pure quantization time, under 2 GiB plus twice the largest tensor.

    Example: jetrl bench convert --gb 4
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jetrl-bench-", dir=folder) as scratch:
        measure(Path(scratch), gb, scales)


def measure(root: Path, gb: float, scales: str) -> dict[str, float]:
    """Run the benchmark in `root` and print it. Returns seconds, bytes and the ratio to the target by name."""
    from jetrl_conversion import convert as conversion
    from jetrl_conversion.jobs import worker_count
    from jetrl_conversion.random_checkpoint import write_random_checkpoint
    from jetrl_conversion.sources import open_source

    write_random_checkpoint(root / "bf16", _config(gb), shard_bytes=1 << 30)
    size = sum(file.stat().st_size for file in (root / "bf16").iterdir())
    largest = max(entry.nbytes for entry in open_source(root / "bf16").reader.entries.values())  # type: ignore[attr-defined]
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(root / "bf16"), str(root / "copy")], check=True)
    copy_s = time.perf_counter() - started
    shutil.rmtree(root / "copy")
    quant_s = _quantize_only(root / "bf16", scales)
    with peak_anonymous() as peak:
        started = time.perf_counter()
        conversion.hf_to_fp8(root / "bf16", root / "fp8", scales=scales)
        convert_s = time.perf_counter() - started
    target, bound = 1.5 * copy_s + quant_s, (2 << 30) + 2 * largest
    typer.echo(f"checkpoint {size / 1e9:.2f} GB, {worker_count()} cores, scales {scales}")
    for name, seconds in (("cp -r", copy_s), ("quantize only", quant_s), ("hf-to-fp8", convert_s)):
        typer.echo(f"{name:14} {seconds:7.2f} s  {size / seconds / 1e9:6.2f} GB/s")
    typer.echo(f"hf-to-fp8 / (1.5 cp + quantize) = {convert_s / target:.2f} (target: at most 1)")
    typer.echo(f"peak anonymous memory {peak[0] / 2**20:.0f} MiB more than before (bound {bound / 2**20:.0f} MiB)")
    return {"size": size, "cp_s": copy_s, "quantize_s": quant_s, "convert_s": convert_s, "ratio": convert_s / target,
            "peak": peak[0], "bound": bound}  # fmt: skip


def _config(gb: float) -> dict:
    """A Qwen3 of 8B-like width with as many layers as fit; at least one."""
    from jetrl_conversion.known_models import known_config
    from jetrl_conversion.model_spec import load_model_spec

    base = known_config("Qwen3-4B") | {"vocab_size": 32768}

    def size(layers: int) -> float:
        tensors = load_model_spec(base | {"num_hidden_layers": layers}).tensors().values()
        return sum(2 * info.shape[0] * (info.shape[1] if len(info.shape) > 1 else 1) for info in tensors) / 1e9

    per_layer = size(2) - size(1)
    layers = max(1, round((gb - size(1)) / per_layer) + 1)
    if gb < size(1):  # small runs, as in tests: a narrower model
        base |= {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "vocab_size": 8192}
        layers = max(1, round((gb - size(1)) / (size(2) - size(1))) + 1)
    return base | {"num_hidden_layers": layers}


def _quantize_only(folder: Path, scales: str) -> float:
    """Seconds that the reference quantizer needs for all FP8 tensors of the folder, with all cores, data in memory."""
    from jetrl_conversion.sources import open_source
    from jetrl_kernels.quant_weight import quant_weight

    source, total = open_source(folder), 0.0
    for name, info in source.spec.tensors().items():
        if info.quantized:
            data = source.read(name, 0, info.shape[0]).clone()
            started = time.perf_counter()
            quant_weight(data, scales)
            total += time.perf_counter() - started
    return total


@contextmanager
def peak_anonymous() -> Iterator[list[int]]:
    """Highest anonymous memory of this process within the block, less what it had before, in bytes.

    Looks every 10 ms at RssAnon in /proc/self/status: pages of mapped files do not count.
    """
    before, peak, stop = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            peak[0] = max(peak[0], _anonymous() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon line")
