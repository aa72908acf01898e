"""A trainer world of one rank in this process, for commands that compare or measure without torchrun."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from jetrl_conversion.model_spec import ModelSpec, load_model_spec
from jetrl_megatron.config import Config


def join() -> None:
    """Set what torchrun would have set, for a world of one."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # whichever is free: nobody else has to find it
    }
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def trainer_of(config: Config, training: bool):
    """(Trainer, its ModelSpec) of `config.model.path` with the folder's weights, or random ones if it holds none.

    Args:
        training: with gradients and optimizer.
    """
    join()
    from jetrl_megatron.megatron import world

    device = world.initialize(config)
    from jetrl_megatron.megatron import weights
    from jetrl_megatron.megatron.trainer import Trainer

    folder = Path(config.model.path)
    spec = load_model_spec(folder)
    trainer = Trainer(config, spec, device, training=training)
    if list(folder.glob("*.safetensors")):
        weights.load_hf(trainer, folder)
    else:
        random_weights(trainer, seed=config.train.seed)
    return trainer, spec


@torch.no_grad()
def random_weights(trainer, seed: int) -> None:
    """Gaussian matrices of standard deviation 1 / sqrt(in), norms of ones: activations keep their size."""
    torch.manual_seed(seed)
    with trainer.bf16_weights():
        for name, parameter in trainer.parameters().items():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
        trainer.weights_loaded()


def largest_layers(spec: ModelSpec, layers: int, folder: Path) -> Path:
    """A folder with the model's config.json, cut to `layers` layers."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**spec.config, "num_hidden_layers": layers}))
    return folder
