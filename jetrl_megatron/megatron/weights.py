"""Hugging Face folders in and out of a running trainer; every rank reads and writes its own rectangles only."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from jetrl_conversion.layout import Layout, pieces
from jetrl_conversion.planner import plan_reshard
from jetrl_conversion.safetensors_io import HFFolderReader, HFFolderWriter, SlotWriter
from jetrl_megatron.collective import from_all
from jetrl_megatron.layouts import trainer_layout
from jetrl_megatron.megatron.trainer import Trainer
from jetrl_megatron.refit.rectangles import cut


@torch.no_grad()
def load_hf(trainer: Trainer, folder: Path) -> None:
    """Fill the BF16 parameters from a folder (any float type, rounded to nearest), then masters and FP8 bytes.

    Raises:
        CheckpointError: tensors missing, extra or of another shape; all listed.
        NonFiniteError: a weight is NaN or Inf.
    """
    reader = HFFolderReader(folder)
    reader.check({name: info.shape for name, info in trainer.spec.tensors().items()})
    with trainer.bf16_weights():
        parameters = trainer.parameters()
        for name in parameters:
            # Rows that pad the vocabulary belong to no Hugging Face tensor.
            if "word_embeddings" in name or "output_layer" in name:
                parameters[name].zero_()
        for piece in pieces(trainer.spec, trainer_layout(trainer.config), dist.get_rank()):
            source = reader.read(piece.hf_name, piece.hf_start, piece.size)
            target = cut(parameters[piece.local_name], piece.local_start, piece.size)
            target.copy_(source.reshape(target.shape))
        trainer.weights_loaded()


@torch.no_grad()
def save_hf(trainer: Trainer, folder: Path, source: Path) -> None:
    """Write the BF16 weights as a Hugging Face folder; config.json and tokenizer are taken from `source`. Collective.

    The folder appears under its name only when all ranks have written.

    Raises:
        ConversionError: `folder` exists. OSError: no room.
    """
    reader, rank = HFFolderReader(source), dist.get_rank()
    tensors = {name: (torch.bfloat16, info.shape) for name, info in trainer.spec.tensors().items()}
    writer, places = None, [None]
    if rank == 0:
        writer = HFFolderWriter(folder, tensors, reader.config, copy=reader.side_files())
        places = [writer.places]
    dist.broadcast_object_list(places, src=0)
    slots, written = SlotWriter(places[0] or {}), {}
    with trainer.bf16_weights():
        parameters = trainer.parameters()
        for t in plan_reshard(trainer.spec, trainer_layout(trainer.config), Layout("hf"), fp8=False).sends(rank):
            block = cut(parameters[t.src_local].detach(), t.src_start, t.size).cpu()
            written[t.hf_name] = written.get(t.hf_name, 0) + slots.write(t.hf_name, t.hf_start, block)
    slots.close()
    counts = from_all(written)
    if writer is not None:
        with writer:
            for part in counts:
                writer.note(part)
    dist.barrier()
