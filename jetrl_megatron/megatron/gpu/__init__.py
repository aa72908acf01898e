"""The engine's GPU operations for the trainer, with gradients, and Transformer Engine's linear layers."""

from jetrl_megatron.megatron.gpu.attention import attention
from jetrl_megatron.megatron.gpu.rope import rope

__all__ = ["attention", "rope"]
