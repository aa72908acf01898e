"""How FP32 masters become the weights of the next step, where Megatron's own way is not wanted.

Megatron rounds each data-parallel rank's masters to nearest into one flat BF16 buffer, which holds the parameters, and
gathers it. Two settings change that; the bytes are those of `quant_weight(master_cast(master))` in every case.

`optimizer.master_cast=stochastic`: the rounding draws from (seed, step, tensor, position in the Hugging Face tensor),
so it does not depend on sharding or rank. A step's rounding can be repeated: it is keyed by the step.

`precision.fp8_param`: FP8 is all that forward and backward keep of a linear layer's weight. Its BF16 parameter is a
shape without memory. With one data-parallel rank a master goes through BF16 to FP8 layer by layer; with several,
Megatron's buffer comes back for the time of the gather.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from jetrl_conversion.layout import Piece, pieces
from jetrl_conversion.model_spec import ModelSpec
from jetrl_kernels.master_cast import master_cast
from jetrl_megatron.config import Config
from jetrl_megatron.layouts import trainer_layout
from jetrl_megatron.megatron.layers import Fp8Weight


def wanted(config: Config) -> bool:
    """Whether anything differs from Megatron's way."""
    return config.precision.fp8_param or config.optimizer.master_cast != "nearest"


class MasterWeights:
    """Takes the place of `_copy_main_params_to_model_params` in Megatron's distributed optimizers.

    Args:
        model: DistributedDataParallel. optimizer: what `get_megatron_optimizer` made of it.
        parameters: this rank's parameters by name. layers: FP8 layers by the same names, without `.weight`.
    """

    def __init__(self, config: Config, spec: ModelSpec, model, optimizer, parameters, layers: dict[str, Fp8Weight]):
        self.rounding, self.seed = config.optimizer.master_cast, config.train.seed
        self.model = model
        self.names = {p: name for name, p in parameters.items()}
        self.layers = {parameters[f"{n}.weight"]: m for n, m in layers.items()} if config.precision.fp8_param else {}
        self.places: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces(spec, trainer_layout(config), dist.get_rank()):
            self.places[piece.local_name].append(piece)
        self._columns = {name: info.shape[-1] for name, info in spec.tensors().items()}
        self.step = 0
        """Of the weights that the masters are rounded to; part of the key of a stochastic rounding."""
        self.alone = parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1
        self.whole = True
        """Whether the BF16 parameters of FP8 layers hold their values."""
        self._optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        for part in self._optimizers:
            part._copy_main_params_to_model_params = lambda part=part: self._write(part)
        # Views of Megatron's buffers, and what stands for them while the buffers have no memory.
        self._views = {p: p.data for p in self.names} if self.layers else {}
        self._own = {p: torch.empty_like(p.data) for p in self._views if p not in self.layers}

    @torch.no_grad()
    def release(self) -> None:
        """Drop the BF16 values of FP8 layers, whose bytes must have been made from them; keep the other parameters."""
        if not self.layers or not self.whole:
            return
        for p, own in self._own.items():
            p.data = own.copy_(self._views[p])
        for p in self.layers:
            p.data = p.data.new_empty(1).expand(p.shape)
        for buffer in self.model.buffers:
            storage = buffer.param_data.untyped_storage()
            if storage.resizable():  # not on a CPU once a checkpoint's writer has moved it into shared memory
                storage.resize_(0)
        self.whole = False

    @torch.no_grad()
    def restore(self, values: bool = True) -> None:
        """Give every parameter its place in Megatron's buffer again; `values`: rounded from the masters. Collective."""
        if self.whole:
            return
        for buffer in self.model.buffers:
            storage = buffer.param_data.untyped_storage()
            if storage.resizable():
                storage.resize_(buffer.param_data.nbytes)
        for p, view in self._views.items():
            p.data = view
        self.whole = True
        if values:
            for part in self._optimizers:
                self._write(part)
            if not self.alone:
                self.model.start_param_sync(force_sync=True)

    def prepare(self, step: int) -> None:
        """Call before the optimizer step that makes the weights of `step`, `release` when their bytes are made."""
        self.step = step
        if not self.alone:
            self.restore(values=False)
        for part in self._optimizers:
            # Nothing is gathered from one rank, and there may be no buffer.
            part._defer_param_sync = not self.whole

    @torch.no_grad()
    def _write(self, part) -> None:
        """Round one optimizer's masters into the buffer or, where it has no memory, into what its layers keep."""
        mains = [p for group in part.shard_fp32_from_float16_groups for p in group]
        for main, p in zip(mains, [p for group in part.model_float16_groups for p in group]):
            ranges = part._get_model_param_range_map(p)
            first = ranges["param"].start
            if self.whole:
                index, _, bucket = part.model_param_gbuf_map[p]
                at = ranges["gbuf_world_in_bucket"]
                target = part.buffers[index].buckets[bucket].param_data.view(-1)[at.start : at.end]
                self._round(main, p, first, target)
            elif p in self.layers:
                weight = torch.empty(p.shape, dtype=p.dtype, device=p.device)
                self._round(main, p, first, weight.view(-1))
                self.layers[p].quantize(weight)
            else:
                self._round(main, p, first, self._own[p].view(-1))

    def _round(self, main: Tensor, p: torch.nn.Parameter, first: int, target: Tensor) -> None:
        """FP32 `main`, elements `first`.. of the flattened parameter, into BF16 `target` of the same length."""
        if self.rounding == "nearest":
            target.copy_(main)
            return
        target.copy_(main)  # rows that pad the vocabulary belong to no Hugging Face tensor
        width = p.shape[-1] if p.dim() > 1 else 1
        for piece in self.places[self.names[p]]:
            (top, left), rows = piece.local_start, piece.size[0]
            for start, stop in rectangles(first, first + main.numel(), top, top + rows, width):
                at = piece.hf_start[0] + start // width - top, piece.hf_start[1] + start % width - left
                # A vector is one row to the cast, and a column to the plan.
                row, column = at if p.dim() > 1 else (0, at[0])
                shape = (-1, min(stop - start, width)) if p.dim() > 1 else (-1,)
                master_cast(
                    main[start - first : stop - first].view(shape),
                    "stochastic",
                    seed=self.seed,
                    step=self.step,
                    tensor_id=tensor_id(piece.hf_name),
                    row0=row,
                    col0=column,
                    global_cols=self._columns[piece.hf_name],
                    out=target[start - first : stop - first].view(shape),
                )


def tensor_id(name: str) -> int:
    """32 bits for a tensor's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def rectangles(start: int, stop: int, top: int, bottom: int, width: int) -> Iterator[tuple[int, int]]:
    """Cut the run [start, stop) of a flattened matrix of `width` columns, as far as it lies in rows [top, bottom), into
    runs that are rectangles: the rest of a first row, whole rows, the beginning of a last one."""
    start, stop = max(start, top * width), min(stop, bottom * width)
    while start < stop:
        end = stop // width * width if start % width == 0 and stop - start >= width else (start // width + 1) * width
        yield start, min(end, stop)
        start = min(end, stop)
