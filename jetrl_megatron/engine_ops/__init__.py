"""The engine's own CPU operations for the trainer: rotary embedding and attention, with gradients.

The two operations whose rounding no textbook formula reproduces are called, not imitated: vLLM's rotary kernel (BF16
table, FP32 product) and its paged attention kernel (unnormalized probabilities rounded to BF16, unrounded ones summed).
"""

from jetrl_megatron.engine_ops.attention import attention
from jetrl_megatron.engine_ops.library import ATTENTION_BLOCK, EngineOpsError, attention_isa, load
from jetrl_megatron.engine_ops.rope import Rope, rope

__all__ = ["ATTENTION_BLOCK", "EngineOpsError", "Rope", "attention", "attention_isa", "load", "rope"]
