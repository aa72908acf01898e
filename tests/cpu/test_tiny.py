"""The tiny model: loadable offline, reproducible, whole tiles, a tokenizer that loses nothing."""

import hashlib
import json
import subprocess
import sys

import pytest

from jetrl_conversion.model_spec import load_model_spec
from jetrl_megatron.data.gym import GymTask
from jetrl_megatron.tiny import BASE_VOCABULARY, TinySizes, common_pieces, make_tiny_model, tiny_shapes


@pytest.fixture(scope="module")
def questions():
    task = GymTask("spell_backward", {}, 0)
    return [task.train_item(i).question for i in range(128)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, questions):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), 3, questions=questions)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_same_seed_same_bytes(tmp_path, folder, questions):
    again = make_tiny_model(tmp_path / "again", 3, questions=questions)
    other = make_tiny_model(tmp_path / "other", 4, questions=questions)

    def digests(where):
        return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(where.iterdir())}

    assert digests(again) == digests(folder)
    assert digests(other)["model.safetensors"] != digests(folder)["model.safetensors"]
    assert digests(other)["tokenizer.json"] == digests(folder)["tokenizer.json"]


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_are_those_of_a_qwen3(tmp_path, tied):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, 0, tied=tied, layers=3, heads=4, kv_heads=2)
    tensors = load_file(folder / "model.safetensors")
    assert {n: tuple(t.shape) for n, t in tensors.items()} == tiny_shapes(TinySizes(tied=tied, layers=3, heads=4))
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
    assert {n: i.shape for n, i in load_model_spec(folder).tensors().items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    model, report = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    same = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert same is tied
    with torch.no_grad():
        logits = model(torch.arange(64)[None]).logits
    assert logits.std() < 2  # a fresh model is unsure: log-probs near -log(V)


def test_sizes_that_break_tiles_are_all_listed(tmp_path):
    with pytest.raises(ValueError) as error:
        make_tiny_model(tmp_path, 0, hidden=192, head_dim=64, heads=3, kv_heads=2, layers=0)
    for part in ("hidden=192", "head_dim=64", "heads=3 do not divide into kv_heads=2", "layers=0"):
        assert part in str(error.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"no room for {BASE_VOCABULARY}"):
        from jetrl_megatron.tiny import make_tiny_tokenizer

        make_tiny_tokenizer(tmp_path, vocabulary=64)


def test_every_printable_character_and_every_id_survives(tokenizer):
    text = "".join(map(chr, range(32, 127))) + "\n\tState 12 - 345 = (x+y)/2"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
    assert len(tokenizer) == 256
    assert all(tokenizer.decode([i]) for i in range(256))
    odd = tokenizer("é→", add_special_tokens=False)["input_ids"]
    assert odd == [tokenizer.unk_token_id] * 2
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert sorted(special) == [0, 1, 2, 3]


def test_digits_stay_single_and_fixed_wording_is_short(tokenizer, questions):
    assert tokenizer.tokenize("-1234") == ["-", "1", "2", "3", "4"]
    tokens = tokenizer.tokenize(questions[0])
    assert "Spell" in tokens and len(tokens) < len(questions[0]) / 2
    word = questions[0].rsplit(" ", 1)[1]
    assert tokens[-len(word) :] == list(word)  # what varies stays in characters


def test_common_pieces_keep_to_the_room():
    questions = ["add one two", "add three", "add four"] * 10
    assert common_pieces(questions, 1) == ["add"]
    assert common_pieces(questions, 0) == common_pieces([], 10) == []
    assert len(common_pieces(questions, 99)) == 5


def test_config_is_plain_json_without_code(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and "auto_map" not in config
    assert config["eos_token_id"] == 2 and config["vocab_size"] == 256


def test_offline_process_loads_the_tokenizer(folder, tokenizer):
    code = f"from transformers import AutoTokenizer as A;print(A.from_pretrained({str(folder)!r})('a 1')['input_ids'])"
    env = {"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    assert out.strip() == str(tokenizer("a 1")["input_ids"]) and json.loads(out)[0] == tokenizer.bos_token_id
