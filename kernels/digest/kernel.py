"""The digest on a GPU: in CUDA C++ at the speed of reading, on other GPUs in Triton."""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl_kernels import cuda_lib
from jetrl_kernels.digest.reference import COL_SEED, ROW_SEED
from jetrl_kernels.triton_lib import splitmix64

_ROW_SEED = tl.constexpr(ROW_SEED)
_COL_SEED = tl.constexpr(COL_SEED)
WIDTH, ROWS, MOST, WARPS = 128, 16, 16, 4
EACH, UNROLL = 64, 8
"""Rows that a thread of the CUDA kernel goes down, and those that it loads at a time: measured best."""

_PACK = struct.Struct("2P4q3I4x").pack
"""`struct Arguments` of `digest.cu`: pointers t, out; 64-bit stride, row0, first, count; 32-bit rows, pieces, period"""
_PACK_MANY = struct.Struct("2P").pack
"""`struct Many`: pointers parts, blocks"""


@triton.jit(do_not_specialize=["row0", "unit0", "loop"])
def _kernel(
    t_ptr,
    partial_ptr,
    rows,
    units,
    stride,
    row0,
    unit0,
    loop,
    BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Unit: a word of 4 bytes (BYTES false) or one byte. unit0: its index in the global row."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # sum of (word + ones) * key = sum of word * key + ones * sum of keys. A word has 32 bits, so its product with a
    # 64-bit key is a wide product with the key's low half plus, 32 bits up, a short one with its high half.
    wide = tl.zeros((ROWS, WIDTH), tl.uint64)
    short = tl.zeros((ROWS, WIDTH), tl.uint32)
    keys = tl.zeros((WIDTH,), tl.uint64)
    for step in range(loop):
        u = (tl.program_id(1).to(tl.int64) * loop + step) * WIDTH + tl.arange(0, WIDTH)
        position = unit0 + u
        mask = (r < rows)[:, None] & (u < units)[None, :]
        value = tl.load(t_ptr + r[:, None] * stride + u[None, :], mask=mask, other=0)
        if BYTES:
            key = splitmix64(position // 4, _COL_SEED) << ((position % 4) * 8).to(tl.uint64)
            word = value.to(tl.uint32)
        else:
            key = splitmix64(position, _COL_SEED)
            word = value.to(tl.uint32, bitcast=True)
        keys += tl.where(u < units, key, 0)
        low = (key & 0xFFFFFFFF).to(tl.uint32)
        high = (key >> 32).to(tl.uint32)
        wide += word.to(tl.uint64) * low.to(tl.uint64)[None, :]
        short += word * high[None, :]
    ones = tl.full((1,), 1 if BYTES else 0x01010101, tl.uint64)
    row_hash = tl.sum(wide + (short.to(tl.uint64) << 32), axis=1) + ones * tl.sum(keys, axis=0)
    row_key = tl.where(r < rows, splitmix64(row0 + r, _ROW_SEED), 0)
    total = tl.sum(row_hash * row_key, axis=0)
    index = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial_ptr + index, total.to(tl.int64, bitcast=True))


def digest_tensor(t: Tensor, row0: int, col0: int) -> Tensor:
    """As `reference.digest_tensor`. Rows must be contiguous within; the rows' stride is free."""
    if t.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=t.device)
    if t.stride(-1) != 1 or t.dim() != 2:
        t = t.clone(memory_format=torch.contiguous_format)
    raw = t.view(torch.uint8)
    first, count = col0 * t.element_size(), raw.shape[1]
    if cuda_lib.available() and raw.is_cuda:
        return _digest_bytes(raw, row0, first)
    by_word = not (first % 4 or count % 4 or (raw.stride(0) % 4 and raw.shape[0] > 1) or raw.data_ptr() % 4)
    if by_word:
        raw, first, count = raw.view(torch.int32), first // 4, count // 4
    pieces = triton.cdiv(count, WIDTH)
    loop = triton.cdiv(pieces, triton.cdiv(pieces, MOST))  # programs of a row share its pieces evenly
    grid = (triton.cdiv(raw.shape[0], ROWS), triton.cdiv(pieces, loop))
    partial = torch.empty(grid, dtype=torch.int64, device=t.device)
    _kernel[grid](
        raw,
        partial,
        raw.shape[0],
        count,
        raw.stride(0),
        row0,
        first,
        loop,
        not by_word,
        WIDTH,
        ROWS,
        num_warps=WARPS,
    )
    return partial.sum()


class Many:
    """Digests of parts that stay where they are on one GPU, time after time, in one launch for each kernel variant.

    Args:
        parts: (which sum it counts for, uint8 [rows, count] contiguous in rows, row0, its first byte in the row).
        sums: how many sums there are.
    """

    def __init__(self, parts: Iterable[tuple[int, Tensor, int, int]], sums: int, device: torch.device):
        self._sums = torch.zeros(sums, dtype=torch.int64, device=device)
        variants: dict[cuda_lib.Kernel, tuple[list[bytes], list[int]]] = {}
        for index, raw, row0, first in parts:
            variant, blocks, arguments = _launch(raw, row0, first, self._sums.data_ptr() + 8 * index)
            together = variants.setdefault(_cuda_kernel("digest_many", *variant), ([], []))
            together[0].append(arguments)
            together[1].append(blocks)
        self._launches = []
        for kernel, (arguments, counts) in variants.items():
            blocks = torch.tensor(counts)
            owner = torch.repeat_interleave(blocks)
            within = torch.arange(len(owner)) - (blocks.cumsum(0) - blocks)[owner]
            tables = torch.frombuffer(bytearray(b"".join(arguments)), dtype=torch.uint8).to(device)
            index = torch.stack([owner, within], 1).int().to(device)
            self._launches.append((kernel, len(owner), _PACK_MANY(tables.data_ptr(), index.data_ptr()), tables, index))

    def __call__(self) -> Tensor:
        """int64 [sums], overwritten by the next call."""
        self._sums.zero_()
        for kernel, blocks, arguments, *_ in self._launches:
            kernel.launch(blocks, arguments, self._sums.device)
        return self._sums


@functools.cache
def _cuda_kernel(name: str, shifted: bool, each: int) -> cuda_lib.Kernel:
    macros = {"SHIFTED": int(shifted), "EACH": each, "UNROLL": min(each, UNROLL), "POW2": 1}
    return cuda_lib.Kernel(cuda_lib.source("digest/digest.cu"), name, macros, 256)


def _digest_bytes(raw: Tensor, row0: int, first: int) -> Tensor:
    """Digest of uint8 [rows, count], contiguous in rows, whose first byte is byte `first` of the global row `row0`."""
    out = torch.zeros((), dtype=torch.int64, device=raw.device)
    variant, blocks, arguments = _launch(raw, row0, first, out.data_ptr())
    _cuda_kernel("digest", *variant).launch(blocks, arguments, raw.device)
    return out


def _launch(raw: Tensor, row0: int, first: int, out: int) -> tuple[tuple[bool, int], int, bytes]:
    """Kernel variant (shifted, each), blocks and arguments that add the digest of `raw` to the number at `out`."""
    rows, count = raw.shape
    stride = raw.stride(0) if rows > 1 else 0
    # Rows whose addresses agree modulo 16 repeat with this period.
    period = min(rows, 16 // math.gcd(stride % 16, 16)) if stride % 16 else 1
    words = stride % 4 == 0 and (first - raw.data_ptr()) % 4 == 0
    pieces = (count + 15 + 15) // 16 if period > 1 else (raw.data_ptr() % 16 + count + 15) // 16
    each = min(EACH, max(4, triton.next_power_of_2(triton.cdiv(rows, period))))
    threads = pieces * period * triton.cdiv(rows, period * each)
    arguments = _PACK(raw.data_ptr(), out, stride, row0, first, count, rows, pieces, period)
    return (not words, each), triton.cdiv(threads, 256), arguments
