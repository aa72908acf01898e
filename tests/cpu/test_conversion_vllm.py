"""vLLM itself agrees: its modules at TP 1 and 2 hold what `pieces` says, and a stock engine runs the FP8 folder.

The file is its own worker: torchrun starts it on two gloo ranks, which build vLLM's model classes and run vLLM's own
weight loaders on each checkpoint; the tests read what they report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from amx import needs_amx

from jetrl_conversion import convert
from jetrl_conversion.model_spec import load_model_spec
from jetrl_conversion.random_checkpoint import write_random_checkpoint
from jetrl_conversion.safetensors_io import HFFolderReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Ends the workers too, also when this process is gone.
LIMIT = ["timeout", "--kill-after=10", "560"]
BASE = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 512, "vocab_size": 331, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "torch_dtype": "bfloat16"}  # fmt: skip
# The expert model comes first: vLLM makes its expert-parallel group only if the first config has experts.
CONFIGS = {
    "qwen3_moe": BASE | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
                         "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True,
                         "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
    "qwen3": BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2_kv1": BASE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False,
                         "num_key_value_heads": 1, "hidden_size": 512},
    "llama": BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
}  # fmt: skip


# vLLM 0.26's FP8 kernel for CPUs refuses BF16 biases (Qwen2) and has no experts; its GPU kernels have both.
ENGINE = ["qwen3", "llama"]
PROMPT = [(7 * i + 3) % 331 for i in range(32)]
ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1",
       "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip


def worker(root: Path, suffix: str) -> None:
    """Build each model at this world's TP, load it with vLLM's loaders, compare every parameter with `pieces`."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    torch.set_num_threads(1)
    os.environ["VLLM_DIST_IDENT"] = f"conversion-{os.environ['MASTER_PORT']}"  # names vLLM's shared memory
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report, started = {}, False
    for name in CONFIGS:
        folder = root / f"{name}{suffix}"
        engine = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
        config = engine.create_engine_config()
        config.parallel_config.tensor_parallel_size = world
        config.parallel_config.rank = rank
        with set_current_vllm_config(config):
            if not started:
                init_distributed_environment(world, rank, "env://", rank, "gloo")
                initialize_model_parallel(world)
                started = True
            torch.set_default_dtype(torch.bfloat16)
            model = initialize_model(config)
            torch.set_default_dtype(torch.float32)
            reader = HFFolderReader(folder)
            model.load_weights((key, reader.whole(key)) for key in reader.entries)  # type: ignore[operator]
        report[name] = differences(folder, dict(model.named_parameters()), rank, world)
    (root / f"report{suffix}_{rank}.json").write_text(json.dumps(report))


def differences(folder: Path, params: dict, rank: int, world: int) -> list[str]:
    from jetrl_conversion.layout import Layout, local_shapes, pieces

    spec, reader, layout, found = load_model_spec(folder), HFFolderReader(folder), Layout("vllm", tp=world), []
    shapes = local_shapes(spec, layout, rank)
    # Beside weights vLLM's FP8 models have four scalars per layer for a quantized KV cache, which nobody asked for.
    weights = {key: tuple(p.shape) for key, p in params.items() if not key.endswith("_scale_inv") and p.dim()}
    if spec.tied:  # some models register the tied head a second time
        weights.pop("lm_head.weight", None)
    if weights != shapes:
        found.append(f"parameters {sorted(weights.items() ^ shapes.items())}")
    for piece in pieces(spec, layout, rank):
        (row, col), (rows, cols) = piece.local_start, piece.size
        local = flat(params[piece.local_name])
        if local is None or not same(local[row : row + rows, col : col + cols], flat(reader.read(
                piece.hf_name, piece.hf_start, piece.size))):  # fmt: skip
            found.append(f"{piece.local_name} is not {piece.hf_name} at {piece.hf_start}")
        if piece.hf_name + "_scale_inv" in reader.entries:
            scale = flat(params[piece.local_name + "_scale_inv"])
            at = (piece.hf_start[0] // 128, piece.hf_start[1] // 128)
            size = (-(-rows // 128), -(-cols // 128))
            local = scale[row // 128 : row // 128 + size[0], col // 128 : col // 128 + size[1]]
            if not same(local, flat(reader.read(piece.hf_name + "_scale_inv", at, size))):
                found.append(f"scales of {piece.local_name} are not those of {piece.hf_name} at {at}")
    return found


def engine(root: Path) -> None:
    """Run the FP8 folders in a stock engine: log-probs of a fixed prompt, and whether weights are FP8 inside."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    report = {}
    for name in ENGINE:
        llm = LLM(str(root / f"{name}_fp8"), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64,
                  max_num_batched_tokens=512, enforce_eager=True)  # fmt: skip
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (out,) = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling, use_tqdm=False)
        assert out.prompt_logprobs is not None
        found = [next(iter(item.values())).logprob for item in out.prompt_logprobs if item]
        report[name] = {"logprobs": found, "method": str(llm.llm_engine.model_config.quantization)}
        del llm
    (root / "engine.json").write_text(json.dumps(report))


def flat(t: torch.Tensor) -> torch.Tensor:
    """The 2-D view that positions count in."""
    t = t.detach()
    return t.flatten(0, 1) if t.dim() == 3 else t.reshape(t.shape[0], -1)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.float(), b.float())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    for name, config in CONFIGS.items():
        write_random_checkpoint(folder / name, config)
        convert.hf_to_fp8(folder / name, folder / f"{name}_fp8")
    return folder


@pytest.mark.parametrize("suffix", [pytest.param("", id="bf16"), pytest.param("_fp8", id="fp8", marks=needs_amx)])
def test_vllm_modules_hold_our_pieces_at_tp_2(root, suffix):
    """TP 1 is what the engine below runs; 2 has cut heads and copied KV heads."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER_"))}
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", __file__]
    done = subprocess.run([*LIMIT, *ranks, str(root), suffix], env=env | ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        report = json.loads((root / f"report{suffix}_{rank}.json").read_text())
        assert not any(report.values()), report
        assert len(report) == len(CONFIGS)


@needs_amx
def test_stock_vllm_runs_the_fp8_folder(root):
    """No plugin: vLLM's own fp8 method. Log-probs against transformers on the dequantized folder."""
    from transformers import AutoModelForCausalLM

    command = [*LIMIT, sys.executable, __file__, str(root), "engine"]
    plain = {"VLLM_PLUGINS": ""}
    done = subprocess.run(command, env=dict(os.environ) | ENV | plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads((root / "engine.json").read_text())
    for name in ENGINE:
        convert.fp8_to_hf(root / f"{name}_fp8", root / f"{name}_back")
        model = AutoModelForCausalLM.from_pretrained(root / f"{name}_back", dtype=torch.bfloat16).eval()
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].float(), -1)
        want = logp[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        got = torch.tensor(report[name]["logprobs"])
        assert report[name]["method"] == "fp8"
        assert got.shape == want.shape
        assert float((got - want).abs().mean()) < 0.02, name


if __name__ == "__main__":
    root_folder, what = Path(sys.argv[1]), sys.argv[2]
    engine(root_folder) if what == "engine" else worker(root_folder, what)
