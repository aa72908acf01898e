"""Broken, hostile and half-written input: named, refused with a non-zero status, nothing under the final name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jetrl_conversion import convert
from jetrl_conversion.errors import CheckpointError, ConversionError
from jetrl_conversion.model_spec import load_model_spec
from jetrl_conversion.random_checkpoint import write_random_checkpoint
from jetrl_conversion.safe_pickle import check_metadata
from jetrl_conversion.safetensors_io import INDEX, HFFolderReader, HFFolderWriter
from jetrl_conversion.sources import open_source
from jetrl_conversion.torch_dist import TorchDistReader
from jetrl_conversion.verify import compare

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 512,
          "vocab_size": 200, "tie_word_embeddings": False, "max_position_embeddings": 128}  # fmt: skip
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sharded folder and its Megatron checkpoint, both good."""
    folder = tmp_path_factory.mktemp("good")
    write_random_checkpoint(folder / "hf", CONFIG, shard_bytes=1 << 20)
    convert.hf_to_megatron(folder / "hf", folder / "mg")
    return folder


@pytest.fixture
def hf(made, tmp_path):
    return Path(shutil.copytree(made / "hf", tmp_path / "hf"))


@pytest.fixture
def mg(made, tmp_path):
    return Path(shutil.copytree(made / "mg", tmp_path / "mg"))


def refused(source: Path, *words: str, error: type[ConversionError] = CheckpointError) -> str:
    """Every conversion refuses `source` with a message that has all `words`, and leaves nothing behind."""
    out = source.parent / "out"
    with pytest.raises(error) as caught:
        (convert.megatron_to_hf if (source / "metadata.json").exists() else convert.hf_to_megatron)(source, out)
    with pytest.raises(error):
        (convert.megatron_to_fp8 if (source / "metadata.json").exists() else convert.hf_to_fp8)(source, out)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert not out.exists() and not list(source.parent.glob(".out*"))
    return text


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def rewrite(folder: Path, config: dict, tensors: dict, values: dict | None = None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    with HFFolderWriter(folder, tensors, config) as writer:
        for name, (dtype, shape) in tensors.items():
            writer.write(name, (0, 0), (values or {}).get(name, torch.ones(shape, dtype=dtype)))
    return folder


def expected_tensors() -> dict:
    return {n: (torch.bfloat16, info.shape) for n, info in load_model_spec(CONFIG).tensors().items()}


def test_index_lists_a_tensor_that_no_shard_holds(hf):
    edit_index(hf, lambda m: m.update({"model.ghost.weight": next(iter(m.values()))}))
    refused(hf, "lists model.ghost.weight, which no shard holds")


def test_index_names_the_wrong_shard(hf):
    def swap(m):
        other = next(v for v in m.values() if v != m[Q])
        m[Q] = other

    edit_index(hf, swap)
    refused(hf, Q, "not in")


def test_shard_missing(hf):
    victim = sorted(hf.glob("*.safetensors"))[1]
    victim.unlink()
    refused(hf, victim.name, "no such file")


@pytest.mark.parametrize("cut", [1, 10_000_000])
def test_shard_cut(hf, cut):
    victim = sorted(hf.glob("*.safetensors"))[0]
    with victim.open("r+b") as handle:
        handle.truncate(max(3, victim.stat().st_size - cut))
    refused(hf, victim.name, "cut")


def test_shard_with_a_hostile_header(hf):
    victim = sorted(hf.glob("*.safetensors"))[0]
    for header in (b"{", b'{"a": 3}', b'{"a": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]}}',
                   b'{"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}', b"[]",
                   b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}, "a": {}}'):  # fmt: skip
        victim.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
        refused(hf, victim.name)
    victim.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    refused(hf, victim.name, "header of")


def test_duplicate_tensor(hf):
    shards = sorted(hf.glob("*.safetensors"))
    shutil.copyfile(shards[0], hf / "model-again.safetensors")
    name = next(n for n, f in HFFolderReader(hf).files.items() if f == shards[0])
    edit_index(hf, lambda m: m.update({"model.extra.weight": "model-again.safetensors"}))
    refused(hf, name, "duplicate")


def test_missing_and_extra_and_misshapen_tensors_all_at_once(tmp_path):
    tensors = expected_tensors()
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = (torch.bfloat16, (4, 4))
    tensors[Q] = (torch.bfloat16, (256, 128))
    folder = rewrite(tmp_path / "hf", CONFIG, tensors)
    text = refused(
        folder, "model.norm.weight is missing", "model.layers.7.mlp.up_proj.weight", "extra", Q, "[256, 128]"
    )
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_named(tmp_path, value):
    for name, dtype in ((Q, torch.bfloat16), ("model.embed_tokens.weight", torch.float32)):
        tensors = expected_tensors()
        tensors[name] = (dtype, tensors[name][1])
        bad = torch.ones(tensors[name][1], dtype=dtype)
        bad[133, 7] = value
        folder = rewrite(tmp_path / "hf", CONFIG, tensors, {name: bad})
        refused(folder, f"{name}: holds {value} at row 133, column 7", error=ConversionError)


def test_unknown_architecture_and_bad_config(hf):
    def config(**changes):
        (hf / "config.json").write_text(json.dumps(CONFIG | changes))

    config(architectures=["Qwen3ForCausalLMs"])
    refused(hf, "unknown architecture 'Qwen3ForCausalLMs'", "did you mean Qwen3ForCausalLM?", error=ConversionError)
    config(hidden_size=0, num_hidden_layers="x")
    refused(hf, "hidden_size must be a positive integer", "num_hidden_layers", error=ConversionError)
    config(quantization_config={"quant_method": "gptq"})
    refused(hf, "gptq")
    (hf / "config.json").write_text("{")
    refused(hf, "config.json", "not JSON")
    (hf / "config.json").unlink()
    refused(hf, "config.json")


def test_remote_code_is_not_carried_along(hf):
    (hf / "modeling_evil.py").write_text("raise SystemExit")
    (hf / "tokenizer.json").write_text("{}")
    convert.hf_to_fp8(hf, hf.parent / "out")
    assert (hf.parent / "out" / "tokenizer.json").is_file() and not list((hf.parent / "out").glob("*.py"))


def test_output_that_exists(hf):
    out = hf.parent / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    for convert_ in (convert.hf_to_megatron, convert.hf_to_fp8):
        with pytest.raises(ConversionError, match="out: exists"):
            convert_(hf, out)
    assert (out / "precious").read_text() == "x"


def test_two_writers_at_once(hf):
    with (
        HFFolderWriter(hf.parent / "out", {}, CONFIG),
        pytest.raises(ConversionError, match="another process is writing it"),
    ):
        convert.hf_to_fp8(hf, hf.parent / "out")
    assert (hf.parent / "out").is_dir()


def test_a_tensor_left_out_is_noticed(tmp_path):
    with (
        pytest.raises(ConversionError, match=r"b: 3 of 4 elements"),
        HFFolderWriter(tmp_path / "out", {"a": (torch.float32, (2,)), "b": (torch.float32, (2, 2))}, CONFIG) as writer,
    ):
        writer.write("a", (0, 0), torch.ones(2))
        writer.write("b", (0, 0), torch.ones(1, 2))
        writer.write("b", (1, 0), torch.ones(1, 1))
    assert not (tmp_path / "out").exists()


def test_disk_full(hf, tmp_path):
    """A limit on the size of files stands for a full disk; the process sees the same kind of error at the same call."""
    code = (
        "import resource, sys; from jetrl_conversion import convert\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "for command, source in zip(sys.argv[2::2], sys.argv[3::2]):\n"
        "    try: getattr(convert, command)(source, sys.argv[1])\n"
        "    except OSError as error: print(error)"
    )
    convert.hf_to_megatron(hf, tmp_path / "megatron")
    words = ["hf_to_fp8", hf, "hf_to_megatron", hf, "megatron_to_hf", tmp_path / "megatron"]
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out", *words], capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert len(said) == 3, done.stderr
    assert all("File too large" in line and "are free" in line and ".out.partial/" in line for line in said)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out.partial"))
    convert.hf_to_fp8(hf, tmp_path / "out")


@pytest.mark.parametrize("command", ["hf_to_fp8", "hf_to_megatron"])
def test_killed_half_way_and_run_again(made, tmp_path, command):
    """SIGKILL while writing: no folder under the final name; what was left over does not stop the next run."""
    code = (
        "import sys, time; from jetrl_conversion import convert, sources;"
        "read = sources.HFSource.read;"
        "sources.HFSource.read = lambda *a: (time.sleep(0.2), read(*a))[1];"
        "getattr(convert, sys.argv[1])(sys.argv[2], sys.argv[3])"
    )
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    process = subprocess.Popen([sys.executable, "-c", code, command, made / "hf", out])
    deadline = time.monotonic() + 60
    while not any(partial.glob("*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert partial.is_dir() and not out.exists()
    getattr(convert, command)(made / "hf", out)
    assert out.is_dir() and not partial.exists() and not list(tmp_path.glob(".out*"))
    if command == "hf_to_megatron":
        assert compare(open_source(made / "hf"), open_source(out)).equal


# Megatron checkpoints.


class Evil:
    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def test_hostile_metadata(mg, tmp_path):
    trap = tmp_path / "ran"
    (mg / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Evil(trap)}))
    text = refused(mg, ".metadata", "refused")
    assert "posix.system" in text and not trap.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "os.system", "torch.load", "torch.hub.load", "builtins.getattr"])
def test_metadata_may_refer_to_nothing_else(mg, name):
    module, _, attribute = name.rpartition(".")
    (mg / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(CheckpointError, match=f"refers to {name}, which a checkpoint has no need of"):
        check_metadata(mg)


def test_hostile_common_state_and_chunks(mg, tmp_path):
    trap = tmp_path / "ran"
    torch.save({"args": Evil(trap)}, mg / "common.pt")
    refused(mg, "common.pt", "posix.system")
    (mg / "common.pt").unlink()
    torch.save([Evil(trap)], mg / "evil.pt")
    reader = TorchDistReader(mg)
    chunk = reader._chunks["decoder.final_layernorm.weight"][0]
    raw = (mg / "evil.pt").read_bytes()
    with chunk.file.open("r+b") as handle:
        handle.seek(chunk.start)
        handle.write(raw[: chunk.nbytes].ljust(chunk.nbytes, b"\0"))
    with pytest.raises(CheckpointError, match=r"decoder\.final_layernorm\.weight"):
        convert.megatron_to_hf(mg, tmp_path / "out")
    assert not trap.exists() and not (tmp_path / "out").exists()


def test_metadata_that_is_no_pickle(mg):
    for raw in (b"", b"garbage", pickle.dumps(3), (mg / ".metadata").read_bytes()[:500]):
        (mg / ".metadata").write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            check_metadata(mg)


def test_data_file_missing_or_cut(mg):
    victim = sorted(mg.glob("*.distcp"))[-1]
    with victim.open("r+b") as handle:
        handle.truncate(victim.stat().st_size - 1)
    refused(mg, victim.name, "(cut)")
    victim.unlink()
    refused(mg, victim.name, "no such file")


def edit_metadata(folder: Path, change) -> None:
    metadata = check_metadata(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_data_outside_of_the_folder(mg):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../" + info.relative_path

    edit_metadata(mg, change)
    refused(mg, "outside of the folder")


def test_tensor_missing_or_of_another_model(mg):
    def drop(metadata):
        del metadata.state_dict_metadata["decoder.final_layernorm.weight"]

    edit_metadata(mg, drop)
    refused(mg, "decoder.final_layernorm.weight is missing")


def test_chunks_that_do_not_cover(mg):
    def drop(metadata):
        metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()

    edit_metadata(mg, drop)
    refused(mg, "decoder.layers.mlp.linear_fc2.weight", "do not cover")


def test_config_of_another_size(mg):
    config = json.loads((mg / "hf" / "config.json").read_text())
    (mg / "hf" / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    refused(mg, "decoder.layers.mlp.linear_fc1.weight", "config.json implies [2, 512, 256]")
    shutil.rmtree(mg / "hf")
    refused(mg, "--config")


def test_not_a_checkpoint_at_all(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "neither a Hugging Face folder")
    with pytest.raises(CheckpointError, match="no such folder"):
        convert.hf_to_fp8(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "run" / "checkpoints" / "step_000040").mkdir(parents=True)
    refused(tmp_path / "run", "name one of its checkpoints", "step_000040")


def test_fp8_folder_with_a_scale_missing_or_of_another_type(made, tmp_path):
    convert.hf_to_fp8(made / "hf", tmp_path / "fp8")
    reader = HFFolderReader(tmp_path / "fp8")
    tensors = {n: (e.dtype, e.shape) for n, e in reader.entries.items()}
    values = {n: reader.whole(n).clone() for n in tensors}
    config = reader.config
    no_scale = {n: t for n, t in tensors.items() if n != Q + "_scale_inv"}
    with pytest.raises(CheckpointError, match=f"{Q} is FP8 without"):
        convert.fp8_to_hf(rewrite(tmp_path / "a", config, no_scale, values), tmp_path / "out")
    bf16 = tensors | {Q + "_scale_inv": (torch.bfloat16, tensors[Q + "_scale_inv"][1])}
    with pytest.raises(CheckpointError, match="scales are float32"):
        convert.fp8_to_hf(rewrite(tmp_path / "b", config, bf16, {n: v.to(bf16[n][0]) for n, v in values.items()}),
                          tmp_path / "out")  # fmt: skip
    with pytest.raises(ConversionError, match="is not FP8"):
        convert.fp8_to_hf(made / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_that_another_writer_did_not_align(tmp_path):
    """safetensors allows any offset: one odd-sized FP8 tensor shifts the FP32 one behind it."""
    header = {"a": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]},
              "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}}  # fmt: skip
    raw = json.dumps(header).encode()
    values = torch.tensor([1.5, -2.25])
    data = torch.tensor([1, 2, 3], dtype=torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data + values.numpy().tobytes())
    (tmp_path / "config.json").write_text("{}")
    reader = HFFolderReader(tmp_path)
    assert torch.equal(reader.whole("b"), values)
    assert reader.whole("a").float().tolist() == [1, 2, 3]
