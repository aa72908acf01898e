"""Codes and scales entering every FP8 GEMM of the engine as users run it, against those of a training forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

PROMPT, MOST = 3, 256
MODULES = {
    "self_attn.qkv_proj": "self_attention.linear_qkv",
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}
"""Engine's module -> trainer's."""


@pytest.fixture(scope="module", params=["compiled", "eager"])
def sides(request, tmp_path_factory):
    """(trainer, engine at its weights, recorder of the trainer's GEMMs)."""
    from gemm_recorder import GemmRecorder

    from jetrl_megatron.commands import one_rank
    from jetrl_megatron.config import Config, ModelConfig, RolloutConfig, TrainConfig
    from jetrl_megatron.layouts import fp8_tensors
    from jetrl_megatron.refit.sender import RefitSender
    from jetrl_megatron.rollout.client import RolloutEngine
    from jetrl_megatron.rollout.pool import EnginePool
    from jetrl_megatron.tiny import make_tiny_model

    model = make_tiny_model(tmp_path_factory.mktemp("tiny"), 7, heads=4, kv_heads=2, hidden=512, ffn=1024)
    config = Config(
        model=ModelConfig(path=str(model)),
        rollout=RolloutConfig(
            max_num_seqs=MOST, max_num_batched_tokens=4096, gpu_memory_utilization=0.0, memory_gib=1.0,
            enforce_eager=request.param == "eager", colocated=False,
        ),
        train=TrainConfig(device="cuda"),
    )  # fmt: skip
    recorder = GemmRecorder(("jetrl_kernels.fp8_linear", "jetrl_megatron.megatron.mlp"))
    trainer, spec = one_rank.trainer_of(config, training=True)
    engine = RolloutEngine(
        model,
        config,
        quantized=fp8_tensors(spec, config),
        output=Path(tmp_path_factory.mktemp("log")),
        cpu=False,
        worker_extension="recording_worker.RecordingWorker",
    )
    pool = EnginePool([engine])
    pool.start()
    try:
        sender = RefitSender(trainer, pool)
        sender.send()
        yield trainer, engine, recorder
        sender.close()
    finally:
        pool.close()


@pytest.mark.parametrize("rows", [1, 31, 32, 256])
def test_codes_and_scales_that_enter_every_gemm_are_the_trainers(sides, rows: int) -> None:
    """`rows` sequences at once: their prefill, and decoding one token of each (from a CUDA graph if compiled)."""
    from gemm_recorder import as_arrays

    from jetrl_megatron.batch import Sample, micro_batches
    from jetrl_megatron.megatron.model import fp8_layers
    from jetrl_megatron.rollout.types import Sampling

    trainer, engine, recorder = sides
    generator = torch.Generator().manual_seed(rows)
    prompts = torch.randint(3, 256, (rows, PROMPT), generator=generator).tolist()
    engine.call_workers("record_gemms")
    answers = engine.generate(prompts, list(range(rows)), Sampling(temperature=1.0, max_tokens=2, stop_token_ids=()))
    decoded = engine.call_workers("recorded_gemms", rows)[0]
    prefilled = engine.call_workers("recorded_gemms", rows * PROMPT)[0]
    samples = [
        Sample(prompt_ids=a.prompt_ids, response_ids=a.token_ids, engine_logp=a.logprobs, policy_version=0, group=0,
               finish_reason="length")
        for a in answers
    ]  # fmt: skip
    batches = micro_batches(samples, [list(range(rows))], 0, rows, 128)
    recorder.start()
    trainer._run([b.to(trainer.device) for b in batches], lambda batch, logp, entropy: (logp.sum(), {}))
    layers, length = fp8_layers(trainer.model), PROMPT + 2
    assert len(decoded) == len(prefilled) == 4 * trainer.spec.num_layers
    differ = []
    for name in decoded:
        _, _, layer, module = name.removesuffix(".weight").split(".", 3)
        qweight = layers[f"decoder.layers.{layer}.{MODULES[module]}"].qweight
        assert qweight is not None
        codes, scale = recorder.entered(qweight.codes, rows * length)
        for what, got, places in [
            ("prefill", prefilled[name], [length * i + j for i in range(rows) for j in range(PROMPT)]),
            ("decode", decoded[name], [length * i + PROMPT for i in range(rows)]),
        ]:
            want = as_arrays((codes.view(torch.uint8)[places].view(codes.dtype), scale[places]))
            if not all(np.array_equal(g, w) for g, w in zip(got, want)):
                differ.append(
                    f"{name} in {what}: {(got[0] != want[0]).sum()} codes, {(got[1] != want[1]).sum()} scales"
                )
    assert not differ
