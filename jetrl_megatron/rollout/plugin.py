"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`): put our names into its registries."""

from __future__ import annotations

NAME = "jetrl"
"""Name of the quantization config and of the weight-transfer backend."""


def register() -> None:
    """Register quantization config, shared layers and weight-transfer engine. Safe to call again.

    A model that does not ask for `quantization="jetrl"` runs vLLM's own layers (`layers.py` falls through to them).
    Workers receive a finished quantization config, so this is the only code of ours that every process runs.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.platforms import current_platform

    if NAME not in QUANTIZATION_METHODS:
        from jetrl_megatron.engine_ops.library import enable_amx
        from jetrl_megatron.rollout import layers
        from jetrl_megatron.rollout.quantization import JetrlConfig

        if current_platform.is_cpu():
            enable_amx()
        layers.register()
        if current_platform.is_cuda():
            from jetrl_megatron.rollout.gpu import attention

            attention.register()
        register_quantization_config(NAME)(JetrlConfig)
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            NAME, "jetrl_megatron.rollout.weight_transfer", "SegmentWeightTransferEngine"
        )
