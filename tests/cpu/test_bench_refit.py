"""What `jetrl bench refit` does on GPUs, here on a CPU: into stock vLLM (`--stock`), and a receiver for each rank of a
replica (`--nccl`)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from amx import needs_amx

from jetrl_conversion.known_models import known_config
from jetrl_megatron.commands import bench_refit_ranks
from jetrl_megatron.rollout.environment import engine_environment

STOCK = """
import sys
import torch
from vllm import LLM
from jetrl_conversion.model_spec import load_model_spec
from jetrl_kernels.quant_weight import quant_weight
from jetrl_megatron.commands.bench_refit_gpu import reload
from jetrl_megatron.config import Config
from jetrl_megatron.layouts import fp8_tensors

block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
llm = LLM(
    model=sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", load_format="dummy", max_model_len=64,
    max_num_seqs=2, enforce_eager=True, kv_cache_memory_bytes=1 << 26, hf_overrides={"quantization_config": block},
)
spec = load_model_spec(sys.argv[1])
for _ in range(2):
    tensors = {name: torch.randn(info.shape).bfloat16() for name, info in spec.tensors().items()}
    llm.collective_rpc(reload, args=(tensors, fp8_tensors(spec, Config())))
    live = llm.apply_model(lambda model: dict(model.named_parameters()))[0]
    mlp = "model.layers.0.mlp."
    gate, up = (quant_weight(tensors[f"{mlp}{name}_proj.weight"], "pow2") for name in ("gate", "up"))
    codes, scales = live[mlp + "gate_up_proj.weight"], live[mlp + "gate_up_proj.weight_scale_inv"]
    wanted = torch.cat([x.codes.view(torch.uint8) for x in (gate, up)])
    # The CPU's kernel has them in another order.
    assert torch.equal(codes.view(torch.uint8).flatten().sort().values, wanted.flatten().sort().values)
    assert torch.equal(scales, torch.cat([gate.scale, up.scale]))
    assert torch.equal(live["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
print("arrived")
"""


@needs_amx
def test_a_stock_engine_takes_the_tensors_that_the_bench_gives_it(tmp_path: Path) -> None:
    config = {**known_config("Qwen3-0.6B"), "num_hidden_layers": 1, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    env = engine_environment(1, cpu=True) | {"VLLM_PLUGINS": "none", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-c", STOCK, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert run.stdout.endswith("arrived\n"), run.stderr[-3000:]


def test_receivers_of_an_expert_parallel_replica_hold_other_experts_each() -> None:
    sizes = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512, "hidden_size": 256}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "config": {**known_config("Qwen3-30B-A3B"), **sizes},
        "source": {"tp": 1},
        "replica": {"ep": 2},
        "replicas": 1,
        "rounds": 1,
        "staging_mib": 64,
        "port": port,
        "device": "cpu",
        "hosts": 2,
    }
    command = [sys.executable, "-m", bench_refit_ranks.__name__, json.dumps(settings)]
    result = json.loads(bench_refit_ranks.run_all([[*command, str(rank)] for rank in range(3)]))
    # It compares their bytes itself.
    assert result["ways"]["ours"]["moved"] == result["bound"] < result["ways"]["gather + FP8"]["moved"]
