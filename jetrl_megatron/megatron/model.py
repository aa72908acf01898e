"""Build Megatron's GPTModel from the facts of a Hugging Face config."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from jetrl_conversion.layout import padded_vocab
from jetrl_conversion.model_spec import ModelSpec
from jetrl_megatron.config import Config
from jetrl_megatron.engine_ops import Rope
from jetrl_megatron.layouts import fp8_tensors, trainer_layout
from jetrl_megatron.megatron.layers import (
    EngineAttention,
    Fp8ColumnParallelLinear,
    Fp8RowParallelLinear,
    Fp8Weight,
    RMSNorm,
    SiluMul,
)
from jetrl_megatron.megatron.mlp import Fp8Mlp


def transformer_config(spec: ModelSpec, config: Config) -> TransformerConfig:
    """Megatron's settings for this model: no dropout, no biases but QKV's, nothing fused that needs CUDA."""
    parallel = config.parallel
    built = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_eps,
        qk_layernorm=spec.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_te_activation_func=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        recompute_granularity="full" if config.model.recompute else None,
        recompute_method="uniform" if config.model.recompute else None,
        recompute_num_layers=1 if config.model.recompute else None,
        perform_initialization=False,
        attention_softmax_in_fp32=True,
        deallocate_pipeline_outputs=True,
    )
    built.rope = Rope.from_hf_config(spec.config)  # type: ignore[attr-defined]
    return built


def linear_classes(backend: str) -> dict[tuple[str, bool], type]:
    """(`column` or `row`, FP8 or not) -> linear layer of a `precision.linear_backend`."""
    if backend == "te":
        from jetrl_megatron.megatron.gpu import te

        return {
            ("column", False): te.TeColumnParallelLinear,
            ("column", True): te.TeFp8ColumnParallelLinear,
            ("row", False): te.TeRowParallelLinear,
            ("row", True): te.TeFp8RowParallelLinear,
        }
    return {
        ("column", False): ColumnParallelLinear,
        ("column", True): Fp8ColumnParallelLinear,
        ("row", False): RowParallelLinear,
        ("row", True): Fp8RowParallelLinear,
    }


def layer_spec(spec: ModelSpec, fp8: set[str], backend: str = "jetrl") -> ModuleSpec:
    """One transformer layer; a projection named in `fp8` runs on FP8 operands, everything else is the same."""
    classes = linear_classes(backend)

    def column(name: str) -> type:
        return classes["column", f"model.layers.0.{name}.weight" in fp8]

    def row(name: str) -> type:
        return classes["row", f"model.layers.0.{name}.weight" in fp8]

    mlp = MLPSubmodules(linear_fc1=column("mlp.gate_proj"), linear_fc2=row("mlp.down_proj"), activation_func=SiluMul)
    fused = mlp.linear_fc1 is Fp8ColumnParallelLinear and mlp.linear_fc2 is Fp8RowParallelLinear
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column("self_attn.q_proj"),
                    core_attention=EngineAttention,
                    linear_proj=row("self_attn.o_proj"),
                    q_layernorm=RMSNorm if spec.qk_norm else IdentityOp,
                    k_layernorm=RMSNorm if spec.qk_norm else IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=partial((Fp8Mlp if fused else MLP).as_mlp_submodule, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
            # Names of Megatron's own layers in a checkpoint, so that norms load into any spec.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def block_spec(
    spec: ModelSpec, config: TransformerConfig, fp8: set[str], backend: str = "jetrl"
) -> TransformerBlockSubmodules:
    """This pipeline stage's layers and, on the last one, the final norm."""
    layers = [layer_spec(spec, fp8, backend)] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def build_model(spec: ModelSpec, config: Config) -> GPTModel:
    """This rank's part of the model, parameters BF16 and not yet loaded.

    Raises:
        ValueError: for an architecture whose training is not supported.
    """
    from megatron.core import parallel_state

    if spec.num_experts:
        raise ValueError(f"{spec.family}: training a mixture of experts is not supported yet; conversion is")
    megatron_config = transformer_config(spec, config)
    fp8 = fp8_tensors(spec, config) if config.precision.mode == "jetrl" else set()
    model = GPTModel(
        config=megatron_config,
        transformer_layer_spec=block_spec(spec, megatron_config, fp8, config.precision.linear_backend),
        vocab_size=padded_vocab(spec, trainer_layout(config)),
        max_sequence_length=config.model.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="none",
    )
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    for module in fp8_layers(model).values():
        module.precision = config.precision
    return model


def fp8_layers(model: torch.nn.Module) -> dict[str, Fp8Weight]:
    """FP8 linear layers of this rank by module name (as in `named_parameters`, without `.weight`)."""
    return {name: module for name, module in unwrap(model).named_modules() if isinstance(module, Fp8Weight)}


def unwrap(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and Float16Module wrappers."""
    while not isinstance(model, GPTModel):
        model = model.module  # type: ignore[assignment]
    return model
