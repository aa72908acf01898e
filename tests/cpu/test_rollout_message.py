"""Messages, segments, digests and the engine's environment: everything of a refit that needs no engine."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rollout_support import VLLM, Sender, quantized_names, random_weights, write_model

from jetrl_conversion.layout import Layout, pieces
from jetrl_kernels.quant_weight import quant_weight
from jetrl_megatron.refit.digests import differing, merge_digests, rank_digests
from jetrl_megatron.refit.message import (
    SCALE_SUFFIX,
    RefitMessage,
    TensorSlot,
    check_slots,
    check_version,
    fp8_parameters,
    plan_slots,
    segment_bytes,
)
from jetrl_megatron.refit.shm import Segment, SegmentError, segment_folder
from jetrl_megatron.rollout.environment import engine_environment
from jetrl_megatron.rollout.types import Sampling


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_slots_hold_every_parameter_once_and_do_not_overlap(spec):
    for chunks in (1, 3):
        slots = plan_slots(spec, VLLM, 0, quantized_names(spec), chunks)
        expected = {s.name: (s.dtype, s.shape) for s in slots}
        assert check_slots(slots, expected, chunks) == []
        assert {s.chunk for s in slots} == set(range(chunks))
        assert all(s.offset % 256 == 0 for s in slots)
    by_name = {s.name: s for s in slots}
    qkv = by_name["model.layers.0.self_attn.qkv_proj.weight"]
    assert (qkv.dtype, qkv.shape) == ("float8_e4m3fn", (1024, 256))
    assert by_name[qkv.name + SCALE_SUFFIX].shape == (8, 2)
    assert by_name["lm_head.weight"].dtype == "bfloat16"
    # Chunks reuse the segment, two at a time: about two thirds of the memory.
    whole = segment_bytes(plan_slots(spec, VLLM, 0, quantized_names(spec)))
    assert whole / 2 < segment_bytes(slots) < 0.7 * whole
    spans = [[(s.offset, s.offset + s.nbytes) for s in slots if s.chunk == chunk] for chunk in range(3)]
    for one, next_ in itertools.pairwise(spans):
        assert all(end <= other or other_end <= start for start, end in one for other, other_end in next_)


def test_a_partly_quantized_fused_parameter_is_refused(spec):
    wanted = quantized_names(spec) - {"model.layers.1.self_attn.k_proj.weight"}
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.qkv_proj\.weight"):
        fp8_parameters(spec, VLLM, 0, wanted)


def test_message_survives_json(spec):
    message = RefitMessage(7, "pow2", ("/dev/shm/x",), (plan_slots(spec, VLLM, 0, quantized_names(spec), 2),), 1, 2)
    assert RefitMessage.from_dict(json.loads(json.dumps(message.to_dict()))) == message


def test_all_problems_of_a_message_are_listed():
    slots = [
        TensorSlot("a.weight", "float8_e4m3fn", (128, 128), 0),
        TensorSlot("a.weight_scale", "float32", (1, 1), 16384),
        TensorSlot("b.weight", "float32", (4,), 100),
        TensorSlot("c.weight", "bfloat16", (4,), 20000, chunk=2),
    ]
    expected = {
        "a.weight": ("float8_e4m3fn", (128, 128)),
        "a.weight_scale_inv": ("float32", (1, 1)),
        "b.weight": ("bfloat16", (4,)),
        "c.weight": ("bfloat16", (4,)),
    }
    found = check_slots(slots, expected, chunks=1)
    assert len(found) == 5, found
    text = "\n".join(found)
    for part in (
        "a.weight_scale_inv: missing",
        "a.weight_scale: the engine has no such parameter (did you mean 'a.weight_scale_inv'?)",
        "b.weight: float32 [4], the engine holds bfloat16 [4]",
        "c.weight: in chunk 2 of 1",
        "b.weight: its bytes overlap those of a.weight",
    ):
        assert part in text
    assert len(check_version(RefitMessage(9, "fp32", (), (), 4, 3), 7, "pow2", 1)) == 4


@pytest.mark.parametrize("layout", [Layout("vllm", tp=2), Layout("megatron", tp=2), Layout("megatron", pp=2)])
def test_digests_do_not_depend_on_the_layout(tmp_path, layout):
    """The same weights cut by `pieces`, with FP8 tiles where the format has them."""
    spec = write_model(tmp_path, intermediate_size=512)
    weights = random_weights(spec, 3)

    def parameters(rank: int, of: Layout) -> dict[str, torch.Tensor]:
        found = {}
        for piece in pieces(spec, of, rank):
            weight, info = weights[piece.hf_name], spec.tensors()[piece.hf_name]
            for suffix, whole, unit in _tensors(weight, info.quantized):
                (row, col), (rows, cols), (at, across) = (
                    tuple(-(-n // unit) for n in pair) for pair in (piece.hf_start, piece.size, piece.local_start)
                )
                # 1-D tensors count as columns of n x 1.
                part = whole[row : row + rows] if whole.dim() == 1 else whole[row : row + rows, col : col + cols]
                shape = (4096,) if whole.dim() == 1 else (4096, max(256, across + cols))
                local = found.setdefault(piece.local_name + suffix, torch.zeros(shape).to(whole.dtype))
                if whole.dim() == 1:
                    local[at : at + rows] = part
                else:
                    local[at : at + rows, across : across + cols] = part
        return found

    def whole_digests(of: Layout) -> dict[str, int]:
        return merge_digests(rank_digests(spec, of, rank, parameters(rank, of)) for rank in range(of.world))

    reference = whole_digests(Layout("hf"))
    assert len(reference) == len(spec.tensors()) + len(quantized_names(spec))
    assert differing(reference, whole_digests(layout)) == []
    # A replica that differs is named as a copy.
    damaged = [parameters(rank, layout) for rank in range(layout.world)]
    norm = next((n for n in damaged[-1] if n.endswith("input_layernorm.weight")), None)
    if layout.tp == 2 and norm is not None:
        damaged[1][norm][3] += 1
        found = merge_digests(rank_digests(spec, layout, rank, part) for rank, part in enumerate(damaged))
        assert differing(reference, found) == ["model.layers.0.input_layernorm.weight#1"]


def _tensors(weight, quantized):
    if not quantized:
        return [("", weight, 1)]
    q = quant_weight(weight)
    return [("", q.codes, 1), (SCALE_SUFFIX, q.scale, 128)]


def test_segment_is_shared_and_cleaned_up():
    segment = Segment.create(4096, "test")
    assert segment.bytes.sum() == 0
    slot = TensorSlot("w", "bfloat16", (8, 8), 256)
    segment.view(slot).copy_(torch.arange(64).view(8, 8))
    other = Segment.attach(segment.path)
    assert torch.equal(other.view(slot), segment.view(slot))
    with pytest.raises(SegmentError, match="w: ends at byte"):
        other.view(TensorSlot("w", "bfloat16", (64, 64), 0))
    segment.unlink()
    with pytest.raises(SegmentError, match="No such file"):
        Segment.attach(segment.path)


def test_only_files_of_this_user_are_mapped(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    link = tmp_path / "link"
    link.symlink_to("/etc/passwd")
    for path in (empty, link, tmp_path):
        with pytest.raises(SegmentError):
            Segment.attach(path)


def test_segments_of_dead_processes_are_removed():
    code = "from jetrl_megatron.refit.shm import Segment; print(Segment.create(4096, 'left').path)"
    left = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    assert left.exists()
    mine = Segment.create(4096, "mine")
    assert not left.exists()
    assert mine.path.exists() and mine.path.parent == segment_folder()
    mine.unlink()


def test_engine_environment_has_no_rendezvous_of_the_trainer():
    base = {
        "PATH": os.environ["PATH"],
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "x",
        "GROUP_RANK": "0",
        "ROLE_WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": "/data/hf",
    }
    env = engine_environment(2, cpu=True, base=base)
    assert {k for k in base if k in env} == {"PATH", "OMP_NUM_THREADS", "HF_HOME"}
    assert env["OMP_NUM_THREADS"] == "2"
    assert engine_environment(2, cpu=False, devices=[3], base=base)["CUDA_VISIBLE_DEVICES"] == "3"


def test_sampling_for_training_is_the_whole_distribution():
    def make(**changes):
        return Sampling(**{"temperature": 1.0, "max_tokens": 4, "stop_token_ids": (2,), **changes})

    assert make().problems() == []
    assert len(make(temperature=0.0, top_p=0.9, top_k=5, max_tokens=0).problems()) == 4
    assert make(temperature=0.0, top_p=0.9, top_k=5, for_training=False).problems() == []


def test_sender_writes_what_plan_and_pieces_say(spec):
    """The tests' own sender, against the digests of the weights themselves."""
    weights, quantized = random_weights(spec, 5), quantized_names(spec)
    sender = Sender(spec, quantized)
    message = sender.message(0, weights)
    held = {slot.name: sender.segment.view(slot) for slot in message.slots[0]}
    hf = {}
    for name, weight in weights.items():
        for suffix, tensor, _ in _tensors(weight, name in quantized):
            hf[name + suffix] = tensor
    sender.segment.unlink()
    assert rank_digests(spec, VLLM, 0, held) == rank_digests(spec, Layout("hf"), 0, hf)
