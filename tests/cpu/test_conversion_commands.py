"""The commands as a user types them: output, exit status, one line for each problem."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from jetrl_conversion import convert
from jetrl_conversion.errors import LayoutError
from jetrl_conversion.plan_report import parse_layout
from jetrl_conversion.random_checkpoint import write_random_checkpoint
from jetrl_conversion.safetensors_io import HFFolderReader
from jetrl_megatron.cli import call

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 512,
          "vocab_size": 300, "tie_word_embeddings": True, "max_position_embeddings": 256}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    write_random_checkpoint(folder / "hf", CONFIG)
    return folder


def jetrl(capsys, *words: object) -> tuple[int, str, str]:
    status = call([str(w) for w in words])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_a_round_trip(made, tmp_path, capsys):
    hf = made / "hf"
    assert jetrl(capsys, "convert", "hf-to-megatron", hf, tmp_path / "mg")[0] == 0
    assert jetrl(capsys, "convert", "megatron-to-hf", tmp_path / "mg", tmp_path / "hf2")[0] == 0
    status, out, _ = jetrl(capsys, "verify", "checkpoint", hf, tmp_path / "hf2")
    assert status == 0 and "equal: 24 tensors" in out
    assert jetrl(capsys, "verify", "checkpoint", tmp_path / "mg", tmp_path / "hf2")[0] == 0
    for scales in ("pow2", "fp32"):
        fp8 = tmp_path / f"fp8_{scales}"
        assert jetrl(capsys, "convert", "hf-to-fp8", hf, fp8, "--scales", scales)[0] == 0
        direct = tmp_path / f"direct_{scales}"
        assert jetrl(capsys, "convert", "megatron-to-fp8", tmp_path / "mg", direct, "--scales", scales)[0] == 0
        assert (fp8 / "model.safetensors").read_bytes() == (direct / "model.safetensors").read_bytes()
        assert jetrl(capsys, "verify", "checkpoint", fp8, direct)[0] == 0
    assert jetrl(capsys, "convert", "fp8-to-hf", tmp_path / "fp8_pow2", tmp_path / "hf3")[0] == 0
    status, out, _ = jetrl(capsys, "verify", "checkpoint", tmp_path / "fp8_pow2", tmp_path / "hf3")
    assert status == 0 and "14 tensors are FP8 on one side only" in out
    status, out, _ = jetrl(capsys, "verify", "checkpoint", tmp_path / "fp8_pow2", tmp_path / "fp8_fp32")
    assert status == 1 and "scale policies differ: pow2 and fp32" in out


def test_verify_says_what_differs_first(made, tmp_path, capsys):
    shutil.copytree(made / "hf", tmp_path / "hf")
    name = "model.layers.1.self_attn.o_proj.weight"
    entry = HFFolderReader(made / "hf").entries[name]
    with (tmp_path / "hf" / "model.safetensors").open("r+b") as handle:
        handle.seek(entry.offset + 2 * (17 * 256 + 5))
        handle.write(torch.tensor([3.0]).bfloat16().view(torch.uint8).numpy().tobytes())
    status, out, _ = jetrl(capsys, "verify", "checkpoint", made / "hf", tmp_path / "hf")
    assert status == 1 and "1 of 24 tensors differ" in out
    assert f"first: {name}: 1 elements differ" in out and "row 17, column 5" in out and "and 3" in out
    # Rows that change places change the digest, although sum and histogram stay.
    convert.hf_to_fp8(made / "hf", tmp_path / "fp8")
    shutil.copytree(tmp_path / "fp8", tmp_path / "swapped")
    entry = HFFolderReader(tmp_path / "fp8").entries[name + "_scale_inv"]
    with (tmp_path / "swapped" / "model.safetensors").open("r+b") as handle:
        handle.seek(entry.offset)
        raw = handle.read(8)
        if raw[:4] == raw[4:]:
            raw = raw[:4] + torch.tensor([0.5]).numpy().tobytes()
        handle.seek(entry.offset)
        handle.write(raw[4:] + raw[:4])
    status, out, _ = jetrl(capsys, "verify", "checkpoint", tmp_path / "fp8", tmp_path / "swapped")
    assert status == 1 and f"first: {name}_scale_inv" in out


def test_verify_logits(made, tmp_path, capsys):
    convert.hf_to_megatron(made / "hf", tmp_path / "mg")
    convert.hf_to_fp8(made / "hf", tmp_path / "fp8")
    status, out, _ = jetrl(capsys, "verify", "checkpoint", made / "hf", tmp_path / "mg", "--logits")
    assert status == 0 and "largest logit difference 0," in out
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo words\n")
    words = ["verify", "checkpoint", made / "hf", tmp_path / "fp8", "--logits", "--prompts", prompts]
    status, out, _ = jetrl(capsys, *words)
    assert status == 1 and "2 prompts, 12 tokens" in out and "first difference over 0: prompt 0 ('one'), token 0" in out
    assert jetrl(capsys, *words, "--tolerance", "100")[0] == 0


def test_errors_are_lines_and_a_status(made, tmp_path, capsys):
    status, _, err = jetrl(capsys, "convert", "hf-to-fp8", tmp_path / "none", tmp_path / "out")
    assert (status, err) == (2, f"error: {tmp_path / 'none'}: no such folder\n")
    status, _, err = jetrl(capsys, "convert", "hf-to-fp8", made / "hf", made / "hf")
    assert status == 2 and err.startswith("error: ") and "exists" in err and err.count("\n") == 1
    status, _, err = jetrl(capsys, "convert", "hf-to-fp8", made / "hf", tmp_path / "out", "--scales", "log2")
    assert status == 2 and "--scales 'log2' is not one of pow2, fp32" in err
    status, _, err = jetrl(capsys, "convert", "hf-to-fp8", made / "hf", tmp_path / "out", "--keep-bf16", "*qproj*")
    assert status == 2 and "matches no tensor" in err
    assert not (tmp_path / "out").exists()


def test_plan_table(capsys):
    status, out, _ = jetrl(capsys, "convert", "plan", "Qwen/Qwen2.5-7B", "--train", "tp=4,pp=2", "--rollout", "tp=2")
    assert status == 0 and "no violations" in out
    (line,) = [line for line in out.splitlines() if line.startswith("model.layers.*.mlp.down_proj.weight")]
    # 28 layers x (3584 x 18944 codes + 28 x 148 scales of 4 bytes), once for each of both ranks' halves.
    assert f"{28 * (3584 * 18944 + 4 * 28 * 148) / 1e9:.3f}" in line and "cols 0-4735 | 1: cols 4736-9471" in line
    status, out, err = jetrl(capsys, "convert", "plan", "Qwen2.5-7B", "--train", "tp=8", "--rollout", "tp=2")
    assert status == 2 and "28 attention heads do not divide by tp = 8" in err
    assert "kept BF16 model.layers.*.mlp.down_proj.weight in megatron(tp=8)" in out and "2368" in out
    status, _, err = jetrl(capsys, "convert", "plan", "Qwen3-8Bs", "--train", "tp=8", "--rollout", "tp=2")
    assert status == 2 and "did you mean Qwen3-8B?" in err


def test_plan_json_from_a_config_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    status, out, _ = jetrl(capsys, "convert", "plan", tmp_path, "--train", "tp=2", "--rollout", "tp=1,dp=2", "--json")
    found = json.loads(out)
    assert status == 0 and found["rollout"]["ranks"] == 2
    assert found["bytes_total"] == sum(found["bytes_received"].values()) == sum(found["bytes_sent"].values())
    (o_proj,) = [t for t in found["tensors"] if "o_proj" in t["name"]]
    assert o_proj["format"] == "FP8" and o_proj["layers"] == 2
    assert [s["rows_and_columns"] for s in o_proj["train"]] == [[[0, 255, 0, 127]], [[0, 255, 128, 255]]]
    assert o_proj["bytes_moved"] == 2 * 2 * (256 * 256 + 4 * 4)


def test_plan_of_the_largest_model_answers_within_five_seconds():
    words = ["convert", "plan", "Qwen3-235B-A22B", "--train", "tp=4,pp=2,ep=8,etp=1,dp=16", "--rollout",
             "tp=8,ep=8,dp=16", "--json"]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "jetrl_megatron.cli", *words], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: it is one thread, and other tests may share the machine.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["train"]["ranks"], found["rollout"]["ranks"]) == (256, 128)
    assert seconds < 5


def test_layout_text():
    assert str(parse_layout("megatron", " tp=4, pp=2,ep=1 ")) == "megatron(tp=4, pp=2)"
    for text, words in (("tpp=4", "did you mean tp?"), ("tp=0", "positive integer"), ("tp=2,tp=2", "twice"),
                        ("tp", "positive integer"), ("tp=two", "'two'")):  # fmt: skip
        with pytest.raises(LayoutError) as error:
            parse_layout("megatron", text)
        assert words in str(error.value)
    with pytest.raises(LayoutError, match="no size 'pp'"):
        parse_layout("vllm", "pp=2")


def test_benchmark_and_memory_bound(tmp_path, capsys):
    """Small here; `jetrl bench convert --gb 4` is the real one. Memory must not grow with the model."""
    from jetrl_megatron.commands.bench_convert import measure

    found = measure(tmp_path, 0.15, "pow2")
    out = capsys.readouterr().out
    assert "cp -r" in out and "hf-to-fp8" in out and "GB/s" in out
    assert 0 < found["peak"] < found["bound"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bf16", "fp8"]
