"""One way to read a model, whatever it is stored as: Hugging Face BF16, Hugging Face block FP8, or Megatron.

Tensors go by their Hugging Face names; `read` returns a run of rows, so that nothing needs more memory than that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from jetrl_conversion.errors import CheckpointError
from jetrl_conversion.megatron_keys import Key, rows_in, stored_keys
from jetrl_conversion.model_spec import ModelSpec, Rule, hf_name, load_model_spec, read_config
from jetrl_conversion.safetensors_io import SCALE_SUFFIX, SIDE_FILES, HFFolderReader
from jetrl_conversion.torch_dist import TorchDistReader
from jetrl_kernels.formats import BLOCK, scale_shape
from jetrl_kernels.quant_weight import dequant_weight

HF_SUBFOLDER = "hf"
"""Where a Megatron checkpoint made here keeps config.json and the tokenizer."""


class Source(Protocol):
    """A model to read. `fp8`: names stored as codes and scales. `policy`: their scale policy, None without FP8."""

    path: Path
    spec: ModelSpec
    fp8: frozenset[str]
    policy: str | None

    def dtype(self, name: str) -> torch.dtype:
        """What `read` returns: the stored dtype; BF16 for a tensor stored in FP8."""
        ...

    def read(self, name: str, row: int, rows: int) -> torch.Tensor:
        """Rows row..row+rows-1 as [rows, cols] (1-D tensors: [rows, 1]); FP8 is dequantized. Do not write to it."""
        ...

    def side_files(self) -> list[Path]: ...


def open_source(path: str | Path, config: str | Path | None = None) -> Source:
    """Open whatever `path` is. `config`: where a foreign Megatron checkpoint's config.json lies.

    Raises:
        CheckpointError: not a model folder, or a broken one.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if (path / "metadata.json").is_file() or (path / ".metadata").is_file():
        return MegatronSource(path, config)
    if runs := sorted(path.glob("checkpoints/step_*")):
        raise CheckpointError(f"{path}: a run's folder; name one of its checkpoints, such as {runs[-1]}")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: neither a Hugging Face folder (config.json) nor a Megatron checkpoint "
                              "(metadata.json)")  # fmt: skip
    return HFSource(path)


class HFSource:
    """A Hugging Face folder, plain or block FP8, held against what its config.json implies."""

    def __init__(self, path: str | Path):
        self.reader = HFFolderReader(path)
        self.path, self.spec = self.reader.path, self.reader.spec()
        quantization = self.reader.config.get("quantization_config")
        self.policy = None
        expected = {name: info.shape for name, info in self.spec.tensors().items()}
        names = set()
        if quantization is not None:
            self.policy = _check_quantization(self.path, self.reader.config)
            names = {name for name in expected if name + SCALE_SUFFIX in self.reader.entries}
            expected |= {name + SCALE_SUFFIX: scale_shape(*expected[name]) for name in names}
        self.fp8 = frozenset(names)
        if self.spec.tied and "lm_head.weight" in self.reader.entries:
            self._check_tied_head()
            expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        self.reader.check(expected)
        self._check_dtypes()

    def _check_tied_head(self) -> None:
        """A tied model may store its head too, if it is the same tensor."""
        head, embed = self.reader.whole("lm_head.weight"), self.reader.whole("model.embed_tokens.weight")
        if head.shape != embed.shape or not torch.equal(head, embed):
            raise CheckpointError(f"{self.path}: config.json ties the embeddings, but lm_head.weight differs from "
                                  "model.embed_tokens.weight")  # fmt: skip

    def _check_dtypes(self) -> None:
        problems = []
        for name, entry in self.reader.entries.items():
            fp8 = entry.dtype == torch.float8_e4m3fn
            if name.endswith(SCALE_SUFFIX) and entry.dtype != torch.float32:
                problems.append(f"{self.reader.files[name]}: {name} is {entry.dtype}, scales are float32")
            elif fp8 and name not in self.fp8:
                problems.append(f"{self.reader.files[name]}: {name} is FP8 without {name}{SCALE_SUFFIX} or without a "
                                "quantization_config in config.json")  # fmt: skip
            elif name in self.fp8 and not fp8:
                problems.append(f"{self.reader.files[name]}: {name} has a scale, but is {entry.dtype}")
        if problems:
            raise CheckpointError(problems)

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self.fp8 else self.reader.entries[name].dtype

    def read(self, name: str, row: int, rows: int) -> torch.Tensor:
        if name not in self.fp8:
            return self.reader.whole(name)[row : row + rows].reshape(rows, -1)
        if row % BLOCK:
            first = row // BLOCK * BLOCK
            return self.read(name, first, row + rows - first)[row - first :]
        codes, scale = self.codes(name, row, rows)
        return dequant_weight(codes, scale, torch.bfloat16)

    def codes(self, name: str, row: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [rows, cols] and their scales; `row` is a multiple of 128."""
        scale = self.reader.whole(name + SCALE_SUFFIX)
        return self.reader.whole(name)[row : row + rows], scale[row // BLOCK : -(-(row + rows) // BLOCK)]

    def side_files(self) -> list[Path]:
        return self.reader.side_files()


class MegatronSource:
    """A Megatron distributed checkpoint of a GPTModel, seen as the Hugging Face tensors it holds. Optimizer state and
    other keys are ignored; vocabulary padding is cut off."""

    fp8: frozenset[str] = frozenset()
    policy: str | None = None

    def __init__(self, path: str | Path, config: str | Path | None = None):
        self.path = Path(path)
        self.side = self.path / HF_SUBFOLDER if config is None else Path(config)
        if config is None and not self.side.is_dir():
            raise CheckpointError(f"{self.path}: holds no {HF_SUBFOLDER}/config.json; name the model with --config")
        self.config: dict[str, Any] = read_config(self.side)
        self.spec = load_model_spec(self.config)
        self.reader = TorchDistReader(self.path)
        self._keys: dict[Rule, list[tuple[Key, str]]] = {}
        self._where: dict[str, tuple[Rule, int | None, int]] = {}
        self._match()
        for rule in self.spec.rules():
            for layer in self.spec.layers(rule):
                for expert in range(rule.experts):
                    self._where[hf_name(rule, layer, expert)] = (rule, layer, expert)

    def _match(self) -> None:
        """Find every stored tensor under one of its names and check its shape."""
        problems = []
        for key in stored_keys(self.spec):
            name = next((n for n in (key.name, *key.aliases) if n in self.reader.tensors), None)
            if name is None:
                problems.append(f"{self.path}: {key.name} is missing")
                continue
            shape = self.reader.tensors[name][1]
            vocab = key.rules[0].row.split == "vocab"
            if shape != key.shape and not (vocab and shape[0] >= key.shape[0] and shape[1:] == key.shape[1:]):
                problems.append(f"{self.path}: {name} has shape {list(shape)}, config.json implies {list(key.shape)}")
            for rule in key.rules:
                self._keys.setdefault(rule, []).append((key, name))
        if self.spec.tied and "output_layer.weight" in self.reader.tensors:
            problems.append(f"{self.path}: holds output_layer.weight, but config.json ties the embeddings")
        if problems:
            raise CheckpointError(problems)

    def _find(self, name: str) -> tuple[Key, str, Rule, tuple[int, ...]]:
        if name not in self._where:
            raise CheckpointError(f"{self.path}: no tensor {name}")
        rule, layer, expert = self._where[name]
        key, stored = next(pair for pair in self._keys[rule] if layer in pair[0].layers)
        return key, stored, rule, key.at(layer, expert)

    def dtype(self, name: str) -> torch.dtype:
        return self.reader.tensors[self._find(name)[1]][0]

    def read(self, name: str, row: int, rows: int) -> torch.Tensor:
        key, stored, rule, lead = self._find(name)
        parts = []
        for run in rows_in(self.spec, rule):
            low, high = max(row, run.row), min(row + rows, run.row + run.rows)
            if low < high:
                start, size = (*lead, run.stored_row + low - run.row), (*[1] * len(lead), high - low)
                if key.ndim == 2:
                    start, size = (*start, 0), (*size, key.cols)
                parts.append(self.reader.read(stored, start, size).reshape(high - low, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def side_files(self) -> list[Path]:
        return [self.side / name for name in SIDE_FILES if (self.side / name).is_file()] if self.side.is_dir() else []


def _check_quantization(path: Path, config: dict[str, Any]) -> str:
    """The scale policy of a block FP8 config; checkpoints of others do not say it and count as fp32."""
    quantization = config["quantization_config"]
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or block != [BLOCK, BLOCK]:
        raise CheckpointError(f"{path / 'config.json'}: quantization {method!r} with blocks {block}; only fp8 with "
                              f"[{BLOCK}, {BLOCK}] is read")  # fmt: skip
    return (config.get("jetrl") or {}).get("scale_policy", "fp32")
