"""The trainer's model and optimizer on this rank: FP32 masters, BF16 weights, FP8 bytes made once per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from jetrl_conversion.model_spec import ModelSpec
from jetrl_megatron.batch import PackedBatch
from jetrl_megatron.collective import from_all
from jetrl_megatron.config import Config
from jetrl_megatron.megatron import forward, master_weights
from jetrl_megatron.megatron.model import build_model, fp8_layers, unwrap


class NonFiniteError(ArithmeticError):
    """A loss, gradient or weight is NaN or Inf. `names` lists what; the optimizer step was not applied."""

    def __init__(self, what: str, names: Sequence[str]):
        self.names = list(names)
        shown = ", ".join(self.names[:8]) + (f" and {len(self.names) - 8} more" if len(self.names) > 8 else "")
        super().__init__(f"NaN or Inf in {what}: {shown}; the step was not applied")


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or Inf. On a GPU, one pass over memory and one wait for all of them."""
    if not tensors:
        return []
    # The largest magnitude is NaN or Inf exactly where an element is.
    peaks = torch._foreach_norm(list(tensors.values()), float("inf"))
    finite = torch.stack([p.float() for p in peaks]).isfinite().tolist()
    return [name for name, good in zip(tensors, finite) if not good]


class Trainer:
    """Megatron model, optimizer and FP8 weights of one rank. `version` counts optimizer steps."""

    def __init__(self, config: Config, spec: ModelSpec, device: torch.device, training: bool = True):
        """With `training=False` there are no gradients and no optimizer: log-probs and refits only."""
        self.config, self.spec, self.device = config, spec, device
        self.version = 0
        self._offloaded = False
        core = build_model(spec, config)
        self.model: Any = core
        self.optimizer: Any = None
        self.masters: master_weights.MasterWeights | None = None
        if not training:
            return
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self.model = DistributedDataParallel(core.config, ddp, core)
        core.config.finalize_model_grads_func = finalize_model_grads
        core.config.grad_scale_func = None
        self.optimizer = get_megatron_optimizer(_optimizer_config(config), [self.model])
        if master_weights.wanted(config):
            self.masters = master_weights.MasterWeights(
                config, spec, self.model, self.optimizer, self.parameters(), fp8_layers(self.model)
            )

    @property
    def core(self):
        """The GPTModel without its wrappers."""
        return unwrap(self.model)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by Megatron name (layer numbers local to the pipeline stage)."""
        return dict(self.core.named_parameters())

    @contextmanager
    def bf16_weights(self) -> Iterator[None]:
        """Within, every BF16 parameter holds its values also under `precision.fp8_param`, and may be read or written.
        Collective. Who writes calls `weights_loaded` (or `quantize`) before leaving."""
        if self.masters is not None:
            self.masters.step = self.version
            self.masters.restore()
        yield
        if self.masters is not None:
            self.masters.release()

    def weights_loaded(self) -> None:
        """Call after writing into the BF16 parameters: masters follow them, FP8 bytes follow both."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
        self.quantize()

    @torch.no_grad()
    def quantize(self) -> None:
        """Make the FP8 bytes of this step: once, and used by every forward and by the refit until the next step.

        Raises:
            NonFiniteError: naming each weight that holds NaN or Inf, on every rank alike.
        """
        if self.masters is None or self.masters.whole:
            self._raise_together("weights", not_finite(self.parameters()))
            for layer in fp8_layers(self.model).values():
                layer.quantize()
        else:  # made already, straight from the masters
            masters = {n: p.main_param for n, p in self.parameters().items()}  # type: ignore[attr-defined]
            self._raise_together("weights", not_finite(masters))

    def step(
        self,
        batches: Sequence[PackedBatch],
        loss: forward.LossFunction,
        check: Callable[[Sequence[PackedBatch]], None] | None = None,
    ) -> tuple[list[dict], float]:
        """Forward, backward and optimizer step over this rank's micro-batches.

        Args:
            check: called (on every rank) before the optimizer step; what it raises leaves the weights as they are.

        Returns:
            Stats of each micro-batch (last pipeline stage only) and the global gradient norm before clipping.

        Raises:
            NonFiniteError: loss or gradients are not finite; weights and optimizer state are as before.
        """
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses: dict[str, Tensor] = {}

        def noted(batch: PackedBatch, logp: Tensor, entropy: Tensor):
            value, stats = loss(batch, logp, entropy)
            losses[f"loss of micro-batch {len(losses)}"] = value.detach()
            return value, stats

        stats = self._run(batches, noted)
        if check is not None:
            check(batches)
        grads = {n: p.main_grad for n, p in self.parameters().items()}
        self._raise_together("loss or gradients", not_finite(losses | grads))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        if self.masters is not None:
            self.masters.prepare(self.version + 1)
        applied, grad_norm, _ = self.optimizer.step()
        if not applied:
            raise NonFiniteError("gradients", ["(found by the optimizer)"])
        self.version += 1
        self.quantize()
        if self.masters is not None:
            self.masters.release()
        return stats, float(grad_norm)

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Log-probs `[T]` of every micro-batch's targets at the current weights (last pipeline stage only)."""
        return forward.logprobs(self.model, batches, **self._scoring())

    def _scoring(self) -> dict[str, Any]:
        return {
            "temperature": self.config.rollout.temperature,
            "vocab_size": self.spec.vocab_size,
            "exact": self.config.precision.parity == "exact",
        }

    def offload(self) -> None:
        """Move masters and optimizer moments to host memory and drop the gradients; weights and FP8 bytes stay."""
        if not self._offloaded:
            self.optimizer.offload_to_cpu()
            self.model.offload_grad_buffers()
            self._offloaded = True

    def restore(self) -> None:
        """Undo `offload`; gradients come back as zeros."""
        if self._offloaded:
            self.model.restore_grad_buffers()
            self.optimizer.restore_from_cpu()
            self._offloaded = False

    def learning_rate(self) -> float:
        """Linear warm-up over `optimizer.warmup_steps`, then constant."""
        o = self.config.optimizer
        return o.lr * min(1.0, (self.version + 1) / max(1, o.warmup_steps))

    def _run(self, batches, loss):
        return forward.run(self.model, batches, loss, **self._scoring())

    @staticmethod
    def _raise_together(what: str, names: list[str]) -> None:
        """Raise on all ranks if any rank has a name, so that nobody waits for one who stopped."""
        flag = torch.tensor([len(names)], dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")
        dist.all_reduce(flag)
        if not flag.item():
            return
        raise NonFiniteError(what, sorted({name for part in from_all(names) for name in part}))


def _optimizer_config(config: Config) -> OptimizerConfig:
    o = config.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.lr,
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.eps,
        clip_grad=o.clip_grad,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
