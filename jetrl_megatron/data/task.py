"""What a task is: questions by index, a held-out split, and a verifiable reward."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

CORRECT = 1.0
"""The reward of a right answer. Whatever a scorer gives below that is partial credit, passed on as it is."""

HELD_OUT_OF_256 = 32
"""Share of the questions (by hash of their text) that training never sees: 1 in 8."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question with its reference answer and whatever its scorer needs."""

    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """A stream of training questions, a held-out set, and the reward.

    Training item `index` depends on (seed, index) alone, so a resumed run draws what an uninterrupted one would.
    """

    name: str

    def train_item(self, index: int, attempt: int = 0) -> Item:
        """The `index`-th (>= 0) training question. Other `attempt`s give substitutes for the same place."""
        ...

    def eval_items(self, count: int) -> list[Item]:
        """Up to `count` distinct held-out questions, the same for every seed; none of them is ever a training item."""
        ...

    def score(self, item: Item, response: str) -> float:
        """Reward of a response text: `CORRECT` for a right answer, else the scorer's partial credit in [0, 1)."""
        ...


def held_out(question: str) -> bool:
    """Whether a question belongs to the evaluation. By its text, so that no seed or index can mix the two splits."""
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] < HELD_OUT_OF_256


def keyed_random(*key: object) -> Random:
    """A generator that depends on `key` alone: not on the process, the hash seed or what was drawn before."""
    return Random(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), "big"))


def final_answer(response: str) -> str:
    """The text of the last `<answer>...</answer>`, or the whole response, without surrounding white space."""
    _, opened, rest = response.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    return (inside if opened and closed else response).strip()
