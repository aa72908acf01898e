"""Questions from a JSONL file or a Hugging Face `datasets` name, answers checked by math-verify."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jetrl_megatron.config import ConfigError, DataConfig, nearest
from jetrl_megatron.data.math_check import is_right
from jetrl_megatron.data.task import CORRECT, Item, held_out, keyed_random

HUB_OPTIONS = ("name", "data_dir", "data_files", "revision", "cache_dir")
"""What `data.options` may hand to `datasets.load_dataset`; `name` is the subset, such as `main` of openai/gsm8k."""


class RecordTask:
    """A finite set of questions, shuffled anew every epoch; none of the held-out ones is trained on."""

    def __init__(self, name: str, train: Sequence[Item], held: Sequence[Item], seed: int):
        """Args:
            train: training candidates; those whose question is also held out are dropped and counted.
            held: held-out items; empty means that the train candidates are split by the hash of their text.

        Raises:
            ConfigError: nothing is left on one side.
        """
        self.name, self.seed = name, seed
        if held:
            secret = {item.question for item in held}
            self._train = [item for item in train if item.question not in secret]
            self.dropped = len(train) - len(self._train)
            self._held = list(held)
        else:
            self._train = [item for item in train if not held_out(item.question)]
            self._held = [item for item in train if held_out(item.question)]
            self.dropped = 0
        problems = []
        if not self._train:
            problems.append(f"data.name: {name} has no training question that is not held out ({len(train)} read)")
        if not self._held:
            problems.append(
                f"data.eval_split: {name} has no held-out question ({len(train)} read; without a split of its own, "
                "1 in 8 is held out by the hash of its text)"
            )
        if problems:
            raise ConfigError(problems)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def train_item(self, index: int, attempt: int = 0) -> Item:
        epoch, place = divmod(index, len(self._train))
        if attempt:
            return self._train[keyed_random(self.seed, index, attempt).randrange(len(self._train))]
        return self._train[self._order(epoch)[place]]

    def eval_items(self, count: int) -> list[Item]:
        order = list(range(len(self._held)))
        keyed_random("held-out").shuffle(order)
        distinct = {self._held[i].question: self._held[i] for i in order}
        return list(distinct.values())[:count]

    def score(self, item: Item, response: str) -> float:
        return CORRECT if is_right(item.answer, response) else 0.0

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        keyed_random(self.seed, "epoch", epoch).shuffle(order)
        return order


def from_jsonl(cfg: DataConfig, seed: int) -> RecordTask:
    """One JSON object a line. `data.eval_split` may name a second .jsonl file; otherwise 1 in 8 is held out.

    Raises:
        ConfigError: files missing, and every bad line by number (the first ten).
    """
    if cfg.options:
        raise ConfigError([f"data.options.{key}: a .jsonl file takes no options" for key in cfg.options])
    train = _read_jsonl(Path(cfg.name), cfg)
    held = _read_jsonl(_beside(Path(cfg.name), cfg.eval_split), cfg) if cfg.eval_split.endswith(".jsonl") else []
    return RecordTask(cfg.name, train, held, seed)


def from_datasets(cfg: DataConfig, seed: int) -> RecordTask:
    """A Hugging Face data set: a hub name, a local folder of data files, or a folder written by `save_to_disk`.

    Raises:
        ConfigError: unknown options, splits or fields, each with the nearest known; data set not found.
    """
    unknown = [key for key in cfg.options if key not in HUB_OPTIONS]
    if unknown:
        raise ConfigError([f"data.options.{key}: unknown option, {nearest(key, HUB_OPTIONS)}" for key in unknown])
    import datasets

    try:
        if (Path(cfg.name) / "dataset_dict.json").is_file() or (Path(cfg.name) / "state.json").is_file():
            loaded: Any = datasets.load_from_disk(cfg.name)
        else:
            loaded = datasets.load_dataset(cfg.name, **cfg.options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError([f"data.name: cannot load {cfg.name!r}: {error}"]) from error
    splits = loaded if isinstance(loaded, dict) else {cfg.split: loaded}
    problems = []
    if cfg.split not in splits:
        problems.append(f"data.split: {cfg.name} has no split {cfg.split!r}, {nearest(cfg.split, splits)}")
    # A data set with the training split alone is divided by hash; a mistyped split of several is refused.
    if cfg.eval_split not in splits and len(splits) > 1:
        problems.append(
            f"data.eval_split: {cfg.name} has no split {cfg.eval_split!r}, {nearest(cfg.eval_split, splits)}"
        )
    if problems:
        raise ConfigError(problems)
    columns = splits[cfg.split].column_names
    missing = [
        f"data.{key}: {cfg.name} has no field {value!r}, {nearest(value, columns)}"
        for key in ("question_field", "answer_field")
        if (value := getattr(cfg, key)) not in columns
    ]
    if missing:
        raise ConfigError(missing)
    train = [_item(row, cfg) for row in splits[cfg.split]]
    apart = cfg.eval_split in splits and cfg.eval_split != cfg.split
    return RecordTask(cfg.name, train, [_item(row, cfg) for row in splits[cfg.eval_split]] if apart else [], seed)


def _item(row: dict[str, Any], cfg: DataConfig) -> Item:
    return Item(question=str(row[cfg.question_field]), answer=str(row[cfg.answer_field]))


def _beside(file: Path, other: str) -> Path:
    """A relative second file lies where it is, or beside the first."""
    return Path(other) if Path(other).is_file() else file.parent / other


def _read_jsonl(path: Path, cfg: DataConfig) -> list[Item]:
    if not path.is_file():
        raise ConfigError([f"data.name: no such file: {path}"])
    items, problems, rows = [], [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(f"{path}:{number}: not JSON: {error.msg}")
            continue
        if not isinstance(row, dict):
            problems.append(f"{path}:{number}: not a JSON object")
            continue
        rows.append(row)
        lacking = [field for field in (cfg.question_field, cfg.answer_field) if field not in row]
        problems += [f"{path}:{number}: no field {field!r}, {nearest(field, row)}" for field in lacking]
        if not lacking:
            items.append(_item(row, cfg))
    everywhere = [
        f"data.{key}: {path} has no field {field!r} in any line, {nearest(field, rows[0])}"
        for key in ("question_field", "answer_field")
        if len(rows) > 1 and not any((field := getattr(cfg, key)) in row for row in rows)
    ]
    if everywhere:
        raise ConfigError(everywhere)
    if problems:
        raise ConfigError(problems[:10] + ([f"... and {len(problems) - 10} more"] if len(problems) > 10 else []))
    return items
