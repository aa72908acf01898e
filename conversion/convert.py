"""The conversions: any source into a Hugging Face folder, a block-FP8 folder, or a Megatron checkpoint.

All are streams: runs of rows are read, checked for NaN and Inf, changed if need be, and written where they belong, on
all cores. Peak memory is a few runs, whatever the size of the model. The output gets its name when it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from jetrl_conversion import fp8_config
from jetrl_conversion.errors import ConversionError
from jetrl_conversion.jobs import Job, run_jobs, worker_count
from jetrl_conversion.megatron_keys import Key, extra_state_keys, rows_in, stored_keys
from jetrl_conversion.model_spec import hf_name
from jetrl_conversion.parallel import Layout
from jetrl_conversion.safetensors_io import SCALE_SUFFIX, HFFolderWriter, write_side_files
from jetrl_conversion.sources import HF_SUBFOLDER, Source, open_source
from jetrl_conversion.tiles import quantized_tensors
from jetrl_conversion.torch_dist import TorchDistWriter, split_rows
from jetrl_kernels.formats import BLOCK, SCALE_POLICIES, scale_shape
from jetrl_kernels.quant_weight import quant_weight

STOCK_VLLM = Layout("vllm")
"""What an FP8 folder must fit at least: vLLM on one device, with its fused QKV and gate/up."""

RUN_BYTES = 32 << 20
"""Bytes of source read at a time by one thread; quantizing a run needs about 12 times that."""


def hf_to_megatron(src: str | Path, dst: str | Path) -> None:
    """Hugging Face folder -> Megatron distributed checkpoint that loads at any TP, PP and EP. Dtypes stay as they are.

    Raises:
        ConversionError, OSError: one line for each problem; nothing appears under `dst`.
    """
    write_megatron(_plain(open_source(src), "hf-to-megatron"), dst)


def megatron_to_hf(src: str | Path, dst: str | Path, *, config: str | Path | None = None) -> None:
    """Megatron distributed checkpoint -> Hugging Face folder. `config`: the model's config.json, if `src` has none."""
    write_hf(open_source(src, config), dst)


def hf_to_fp8(
    src: str | Path,
    dst: str | Path,
    *,
    scales: str = "pow2",
    keep_bf16: Iterable[str] = (),
    layouts: Iterable[Layout] = (),
) -> None:
    """Hugging Face or Megatron -> block-FP8 Hugging Face folder.

    Args:
        scales: scale policy, "pow2" or "fp32".
        keep_bf16: glob patterns over names that stay BF16, with what is fused with them.
        layouts: besides stock vLLM on one device, layouts that must be able to hold the bytes; what they cannot hold
            stays BF16 and is listed in the card.
    """
    write_fp8(_plain(open_source(src), "hf-to-fp8"), dst, scales=scales, keep_bf16=keep_bf16, layouts=layouts)


def megatron_to_fp8(
    src: str | Path,
    dst: str | Path,
    *,
    scales: str = "pow2",
    keep_bf16: Iterable[str] = (),
    layouts: Iterable[Layout] = (),
    config: str | Path | None = None,
) -> None:
    """Megatron distributed checkpoint -> block-FP8 Hugging Face folder, the same bytes as by way of BF16."""
    write_fp8(open_source(src, config), dst, scales=scales, keep_bf16=keep_bf16, layouts=layouts)


def fp8_to_hf(src: str | Path, dst: str | Path) -> None:
    """Block-FP8 folder -> BF16 folder of the dequantized values (exact under pow2 scales)."""
    source = open_source(src)
    if source.policy is None:
        raise ConversionError(f"{src}: is not FP8 (no quantization_config in config.json)")
    write_hf(source, dst)


def _plain(source: Source, command: str) -> Source:
    if source.policy is not None:
        raise ConversionError(f"{source.path}: is FP8 already and FP8 is never requantized; {command} reads BF16 "
                              "(`fp8-to-hf` gives the dequantized values)")  # fmt: skip
    return source


def write_hf(source: Source, dst: str | Path) -> None:
    """Write `source` as a plain Hugging Face folder, each tensor in the dtype that the source has."""
    tensors = {name: (source.dtype(name), info.shape) for name, info in source.spec.tensors().items()}
    config = {k: v for k, v in source.spec.config.items() if k not in ("quantization_config", "jetrl")}
    with HFFolderWriter(dst, tensors, config, copy=source.side_files()) as writer:
        jobs = []
        for name, (dtype, shape) in tensors.items():
            row_bytes = _row_bytes(shape, dtype)
            for row, rows in split_rows(shape[0], row_bytes, _run_bytes(), BLOCK):
                jobs.append((_copy(source, writer, name, row, rows), rows * row_bytes))
        run_jobs(jobs, f"writing {Path(dst).name}")


def write_fp8(
    source: Source, dst: str | Path, *, scales: str, keep_bf16: Iterable[str] = (), layouts: Iterable[Layout] = ()
) -> None:
    """Write `source` as a block-FP8 folder. See `hf_to_fp8`."""
    if scales not in SCALE_POLICIES:
        raise ConversionError(f"--scales {scales!r} is not one of {', '.join(SCALE_POLICIES)}")
    layouts = [STOCK_VLLM, *layouts]
    fp8 = quantized_tensors(source.spec, *layouts, keep_bf16=keep_bf16)
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, info in source.spec.tensors().items():
        tensors[name] = (torch.float8_e4m3fn if name in fp8 else source.dtype(name), info.shape)
        if name in fp8:
            tensors[name + SCALE_SUFFIX] = (torch.float32, scale_shape(*info.shape))
    config = fp8_config.make_config(source.spec, fp8, scales)
    card = fp8_config.make_card(source.spec, fp8, scales, layouts, Path(dst).name)
    with HFFolderWriter(dst, tensors, config, copy=source.side_files(), text={"README.md": card}) as writer:
        jobs = []
        for name, info in source.spec.tensors().items():
            row_bytes = _row_bytes(info.shape, source.dtype(name))
            for row, rows in split_rows(info.shape[0], row_bytes, _run_bytes(), BLOCK):
                at = (source, writer, name, row, rows)
                jobs.append((_quantize(*at, scales) if name in fp8 else _copy(*at), rows * row_bytes))
        run_jobs(jobs, f"writing {Path(dst).name}")


def write_megatron(source: Source, dst: str | Path) -> None:
    """Write `source` as a Megatron distributed checkpoint; config.json and tokenizer go into its `hf` subfolder."""
    spec = source.spec
    keys = stored_keys(spec)
    tensors = {}
    for key in keys:
        dtypes = {source.dtype(hf_name(rule, key.layers[0])) for rule in key.rules}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        tensors[key.name] = (dtype, key.shape)
        if _both_names(key):
            tensors[key.aliases[0]] = (dtype, key.shape)
    lanes = worker_count()
    objects: dict[str, Any] = {"common_state/shard_0_1": {}, **dict.fromkeys(extra_state_keys(spec))}
    with TorchDistWriter(dst, tensors, objects=objects, lanes=lanes) as writer:
        config = {k: v for k, v in source.spec.config.items() if k not in ("quantization_config", "jetrl")}
        write_side_files(writer.folder.path / HF_SUBFOLDER, config, source.side_files())
        jobs: list[Job] = []
        for key in keys:
            dtype = tensors[key.name][0]
            row_bytes = key.cols * dtype.itemsize
            for layer in key.layers:
                for expert in range(key.rules[0].experts):
                    for row, rows in split_rows(key.rows, row_bytes, _run_bytes(), BLOCK):
                        work = _stack(source, writer, key, layer, expert, row, rows, len(jobs) % lanes)
                        jobs.append((work, rows * row_bytes))
        run_jobs(jobs, f"writing {Path(dst).name}")


def _both_names(key: Key) -> bool:
    """Norms before experts: the local and the TE layer spec look for them under different keys."""
    return bool(key.aliases) and key.rules[0].row.where == "moe"


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape[1:]) * dtype.itemsize


def _run_bytes() -> int:
    """Smaller runs when there are many threads, so that all together stay under 1 GiB while quantizing."""
    return max(1 << 20, min(RUN_BYTES, (1 << 30) // (12 * worker_count())))


def _copy(source: Source, writer: HFFolderWriter, name: str, row: int, rows: int):
    def work() -> None:
        data = source.read(name, row, rows)
        require_finite(data, f"{source.path}: {name}", row)
        writer.write(name, (row, 0), data)

    return work


def _quantize(source: Source, writer: HFFolderWriter, name: str, row: int, rows: int, scales: str):
    def work() -> None:
        data = source.read(name, row, rows)
        q = quant_weight(data.to(torch.bfloat16) if data.dtype == torch.float16 else data, scales)
        if not bool(torch.isfinite(q.scale).all()):  # the quantizer marks tiles that hold NaN or Inf by their scale
            require_finite(data, f"{source.path}: {name}", row)
            raise ConversionError(f"{source.path}: {name}: rows {row}..{row + rows - 1} overflow BF16")
        writer.write(name, (row, 0), q.codes)
        writer.write(name + SCALE_SUFFIX, (row // BLOCK, 0), q.scale)

    return work


def _stack(source: Source, writer: TorchDistWriter, key: Key, layer: int | None, expert: int, row: int, rows: int,
           lane: int):  # fmt: skip
    """Put rows row..row+rows-1 of a stored tensor together from the Hugging Face tensors that lie there."""

    def work() -> None:
        dtype = writer.tensors[key.name][0]
        data = torch.empty(rows, key.cols, dtype=dtype)
        for rule in key.rules:
            name = hf_name(rule, layer, expert)
            for run in rows_in(source.spec, rule):
                low, high = max(row, run.stored_row), min(row + rows, run.stored_row + run.rows)
                if low < high:
                    part = source.read(name, run.row + low - run.stored_row, high - low)
                    require_finite(part, f"{source.path}: {name}", run.row + low - run.stored_row)
                    data[low - row : high - row] = part
        lead = key.at(layer, expert)
        box = data.view(*[1] * len(lead), *data.shape) if key.ndim == 2 else data.view(*[1] * len(lead), rows)
        at = (*lead, row, 0) if key.ndim == 2 else (*lead, row)
        writer.write(lane, key.name, at, box)
        if _both_names(key):
            writer.write(lane, key.aliases[0], at, box)

    return work


def require_finite(data: torch.Tensor, what: str, row0: int = 0) -> None:
    """Raise ConversionError naming the tensor and the first place that holds NaN or Inf.

    BF16 is looked at as integers (exponent bits all ones), which is several times faster than `isfinite`.
    """
    if data.dtype == torch.bfloat16:
        if not data.numel() or int((data.view(torch.int16) & 0x7FFF).max()) < 0x7F80:
            return
    elif bool(torch.isfinite(data).all()):
        return
    at = (~torch.isfinite(data.float())).nonzero()[0].tolist()
    value = data[tuple(at)].item()
    raise ConversionError(f"{what}: holds {value} at row {row0 + at[0]}, column {at[1] if len(at) > 1 else 0}")
