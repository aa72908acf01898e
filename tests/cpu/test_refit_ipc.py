"""Copies out of mapped tables, on CPU tensors: views, padding, refusals. (CUDA IPC itself: tests/gpu.)"""

from __future__ import annotations

import pytest
import torch

from jetrl_megatron.refit import ipc, rectangles
from jetrl_megatron.refit.shm import SegmentError

SEGMENT = ipc.PREFIX + "table"


def _importer(sources: dict[str, torch.Tensor], copies: list) -> ipc.Importer:
    importer = ipc.Importer()
    importer._tables["table"] = (sources, [copies])
    return importer


def test_rectangles_arrive_and_padding_is_found() -> None:
    sources = {"w": torch.randn(256, 128).to(torch.float8_e4m3fn), "n": torch.arange(8).bfloat16()}
    copies = [
        ("w", (128, 0), (128, 128), "qkv", (0, 0)),
        ("w", (0, 0), (128, 128), "qkv", (128, 0)),
        ("n", (0, 0), (6, 1), "norm", (2, 0)),
    ]
    live = {"qkv": torch.zeros(256, 128).to(torch.float8_e4m3fn), "norm": torch.full((8,), 7.0).bfloat16()}
    pairs = _importer(sources, copies).pairs(SEGMENT, 0, live)
    assert ipc.uncovered(pairs, live) == ["norm"]
    rectangles.copy(rectangles.copies(pairs))
    swapped = torch.cat([sources["w"][128:].float(), sources["w"][:128].float()])
    assert torch.equal(live["qkv"].float(), swapped)
    assert live["norm"].tolist() == [7, 7, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(4))
def test_any_rectangles_arrive_whatever_their_alignment(seed: int) -> None:
    # Whole words, odd bytes, column cuts, single rows: copied in groups of one kind.
    random = torch.Generator().manual_seed(seed)
    source, target = torch.randint(0, 256, (2, 96, 128), generator=random, dtype=torch.uint8)
    wanted, pairs = target.clone(), []
    for row in range(0, 96, 8):
        left, width, step = (int(n) for n in torch.randint(1, 40, (3,), generator=random))
        left, width = ((0, 128), (8 * (left % 4), 64), (left, width))[row // 8 % 3]
        rows = slice(row, row + 1 + step % 8)
        pairs.append((target[rows, left : left + width], source[rows, left : left + width]))
        wanted[rows, left : left + width] = source[rows, left : left + width]
    made = rectangles.copies(pairs)
    rectangles.copy(made)
    assert torch.equal(target, wanted)
    assert 1 < len(made) <= 4


def test_views_are_made_anew_when_a_parameter_has_moved() -> None:
    sources = {"w": torch.ones(4, 4)}
    importer = _importer(sources, [("w", (0, 0), (4, 4), "x", (0, 0))])
    first, second = {"x": torch.zeros(4, 4)}, {"x": torch.zeros(4, 4)}
    for live in (first, first, second):
        rectangles.copy(rectangles.copies(importer.pairs(SEGMENT, 0, live)))
    assert torch.equal(first["x"], sources["w"]) and torch.equal(second["x"], sources["w"])


def test_everything_that_does_not_fit_is_named() -> None:
    importer = _importer(
        {"w": torch.ones(4, 4)}, [("w", (0, 0), (4, 4), "x", (0, 0)), ("w", (0, 0), (4, 4), "y", (0, 0))]
    )
    with pytest.raises(SegmentError, match=r"x at .*bfloat16.*y: the engine has no such parameter"):
        importer.pairs(SEGMENT, 0, {"x": torch.zeros(4, 4, dtype=torch.bfloat16)})


def test_a_table_that_is_not_there_is_refused() -> None:
    with pytest.raises(SegmentError, match="nowhere"):
        ipc.Importer().pairs(ipc.PREFIX + "/dev/shm/nowhere.json", 0, {})
