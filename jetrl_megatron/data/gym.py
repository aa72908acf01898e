"""Any reasoning-gym dataset by name, with its own scorer."""

from __future__ import annotations

import dataclasses
import random
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jetrl_megatron.config import ConfigError, nearest
from jetrl_megatron.data.expressions import evaluates, harmless, time_limit
from jetrl_megatron.data.task import Item, final_answer, held_out, keyed_random

MAX_ATTEMPTS = 2000
"""Draws for one item of the wanted split before a dataset counts as having too few distinct questions."""

EVAL_SEED = "held-out"
SCORE_SECONDS = 5.0

UNBOUNDED = 2**31
BOUNDED = 8192
"""Places to draw from: most generators take any index; a few make tables of `size` entries when they are built."""


class GymTask:
    """Questions of one reasoning-gym generator, split by a hash of the question text."""

    def __init__(self, name: str, options: dict[str, Any], seed: int):
        """Args:
            name: registered name, such as `chain_sum`.
            options: keyword arguments of the dataset's config class.
            seed: of the training stream.

        Raises:
            ConfigError: unknown name or options (each with the nearest known), or values that the dataset refuses.
        """
        self.name, self.seed = f"reasoning_gym:{name}", seed
        self._dataset, self._places = _create(name, options)
        self._evaluates = evaluates(type(self._dataset).score_answer) or name == "composite"
        self.scorer_errors = 0

    def train_item(self, index: int, attempt: int = 0) -> Item:
        for draw in range(MAX_ATTEMPTS):
            item = self._draw("train", self.seed, index, attempt, draw)
            if item and not held_out(item.question):
                return item
        raise ConfigError([f"data.name: {self.name} has no training question outside the held-out ones"])

    def eval_items(self, count: int) -> list[Item]:
        items: dict[str, Item] = {}
        misses = draw = 0
        while len(items) < count and misses < MAX_ATTEMPTS:
            item = self._draw("eval", EVAL_SEED, 0, 0, draw)
            draw += 1
            if item and held_out(item.question) and item.question not in items:
                items[item.question], misses = item, 0
            else:
                misses += 1
        if not items:
            raise ConfigError([f"data.name: {self.name} has too few distinct questions for a held-out split"])
        return list(items.values())

    def score(self, item: Item, response: str) -> float:
        """The dataset's own score of the (tagged or whole) answer.

        0 for text on which the scorer fails or takes longer than `SCORE_SECONDS`, and for text that a scorer would
        run as a program.
        """
        answer = final_answer(response)
        if self._evaluates and answer != item.answer and not harmless(answer):
            return 0.0
        entry = {"question": item.question, "answer": item.answer, "metadata": item.metadata}
        try:
            with time_limit(SCORE_SECONDS):
                return float(self._dataset.score_answer(answer, entry))
        except Exception:
            # Scorers of a hundred datasets meet text that their authors never tried: wrong answer, not a failed run.
            self.scorer_errors += 1
            return 0.0

    def _draw(self, *key: object) -> Item | None:
        # One dataset object with a fixed seed; a draw is a random place in it. Neighbouring seeds then share nothing
        # (reasoning-gym adds seed + index, so seed 0 and seed 1 would be the same stream, shifted by one).
        place = keyed_random(*key).randrange(self._places)
        try:
            with _global_generators(place):
                entry = self._dataset[place]
        except IndexError:
            # word_ladder: no puzzle at this place. It also shrinks its size then, which would make what follows
            # depend on what was drawn before.
            self._dataset.size = self._places
            return None
        answer = "" if entry["answer"] is None else str(entry["answer"])
        return Item(question=entry["question"], answer=answer, metadata=entry["metadata"])


@contextmanager
def _global_generators(seed: int) -> Iterator[None]:
    """Python's and numpy's global generators seeded inside, untouched outside.

    list_functions draws from the first, pool_matrix reseeds the second: without this an item would depend on the
    draws before it, and drawing one would change what the trainer's process draws.
    """
    import numpy

    python, legacy = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(legacy)


def _create(name: str, options: dict[str, Any]) -> tuple[Any, int]:
    """The dataset object and the number of places it can be asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a dependency compares literals with `is`
        from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError([f"data.name: unknown reasoning-gym dataset {name!r}, {nearest(name, sorted(DATASETS))}"])
    dataset_class, config_class = DATASETS[name]
    hints = typing.get_type_hints(config_class)
    known = [f.name for f in dataclasses.fields(config_class) if f.init and f.name not in ("seed", "size")]
    problems = []
    for key, value in options.items():
        if key in ("seed", "size"):
            problems.append(f"data.options.{key}: set by train.seed and the number of steps, not here")
        elif key not in known:
            problems.append(f"data.options.{key}: unknown option of {name}, {nearest(key, known)}")
        elif hints.get(key) in (int, float, bool, str) and not _fits(value, hints[key]):
            problems.append(f"data.options.{key}: {value!r} is not of type {hints[key].__name__}")
    if problems:
        raise ConfigError(problems)
    try:
        dataset = _build(name, dataset_class, config_class, options)
        try:
            dataset[UNBOUNDED - 1]
            bounded = name == "composite"  # its parts may be bounded even if this draw met one that is not
        except IndexError:
            bounded = True
        if bounded:
            dataset = _build(name, dataset_class, config_class, {**options, "size": BOUNDED})
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError([f"data.options: {name} refuses {options}: {error or type(error).__name__}"]) from error
    return dataset, BOUNDED if bounded else UNBOUNDED


def _build(name: str, dataset_class: Any, config_class: Any, options: dict[str, Any]) -> Any:
    if name == "composite":
        from reasoning_gym.composite import DatasetSpec

        specs = [DatasetSpec(**spec) if isinstance(spec, dict) else spec for spec in options.get("datasets", [])]
        options = {**options, "datasets": specs}
    config = config_class(seed=0, **options)
    if hasattr(config, "validate"):
        config.validate()
    return dataset_class(config=config)


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
