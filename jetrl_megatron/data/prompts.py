"""From questions to token ids, and back to what supervised warm-up learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jetrl_megatron.config import Config, ConfigError, DataConfig
from jetrl_megatron.data.task import Item, Task, keyed_random

QUESTION_END = "\n"
"""Closes a question when there is no chat template: the response starts on a line of its own."""

MAX_SKIPS = 1000
"""Questions in a row that are too long before the run is refused: the task does not fit the model's length."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A question with the token ids that the engine is given (and the trainer consumes)."""

    item: Item
    ids: list[int]


def encode_prompt(tokenizer: Any, question: str, cfg: DataConfig) -> list[int]:
    """Token ids of a prompt, with at most one BOS in front and no EOS invented at the end.

    Args:
        tokenizer: a transformers tokenizer.
        cfg: `chat_template` chooses between the tokenizer's template (one user turn, generation prompt added) and the
            plain question followed by a line end.

    Raises:
        ConfigError: a chat template is asked for and the tokenizer has none.
    """
    if cfg.chat_template:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(["data.chat_template: the tokenizer has no chat template; set it to false"])
        turns = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    else:
        text = question + QUESTION_END
    # add_special_tokens stays on for templates too: some write the BOS themselves and some leave it to the tokenizer.
    # Either way exactly the surplus ones go.
    ids = list(tokenizer(text, add_special_tokens=True)["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        del ids[0]
    if ids and ids[-1] == eos and not (cfg.chat_template and text.rstrip().endswith(str(tokenizer.eos_token))):
        del ids[-1]
    return ids


def encode_answer(tokenizer: Any, answer: str) -> list[int]:
    """Token ids of a response that supervised training learns: the answer, then EOS."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(["model.path: the tokenizer has no EOS token, so an answer could never end"])
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


class PromptStream:
    """Prompts of every step by number. A question that leaves no room for the response is replaced and counted."""

    def __init__(self, task: Task, tokenizer: Any, config: Config):
        self.task, self.tokenizer, self.config = task, tokenizer, config
        self.limit = config.model.max_length - config.rollout.max_response_tokens
        self.skipped = 0

    def prompt(self, index: int) -> Prompt:
        """The `index`-th training prompt; depends on (seed, index) alone.

        Raises:
            ConfigError: `MAX_SKIPS` questions in a row are too long.
        """
        shortest = None
        for attempt in range(MAX_SKIPS):
            item = self.task.train_item(index, attempt)
            ids = encode_prompt(self.tokenizer, item.question, self.config.data)
            if len(ids) <= self.limit:
                return Prompt(item=item, ids=ids)
            self.skipped += 1
            shortest = min(len(ids), shortest or len(ids))
        raise ConfigError([self._too_long(f"{MAX_SKIPS} questions in a row need", shortest)])

    def step(self, step: int) -> list[Prompt]:
        """The prompts of one step (steps count from 0)."""
        size = self.config.grpo.prompts_per_step
        return [self.prompt(step * size + i) for i in range(size)]

    def evaluation(self) -> list[Prompt]:
        """The held-out prompts that fit, at most `data.eval_size`; the others are counted as skipped."""
        encoded = [
            Prompt(item=item, ids=encode_prompt(self.tokenizer, item.question, self.config.data))
            for item in self.task.eval_items(self.config.data.eval_size)
        ]
        fitting = [prompt for prompt in encoded if len(prompt.ids) <= self.limit]
        self.skipped += len(encoded) - len(fitting)
        if not fitting:
            raise ConfigError([self._too_long("every held-out question needs", min(len(p.ids) for p in encoded))])
        return fitting

    def _too_long(self, what: str, shortest: int | None) -> str:
        return (
            f"model.max_length: {what} {shortest} prompt tokens or more, but {self.config.model.max_length} less "
            f"rollout.max_response_tokens={self.config.rollout.max_response_tokens} leaves {self.limit}"
        )


def supervised_example(
    task: Task, tokenizer: Any, config: Config, index: int, wrong_share: float = 0.0
) -> tuple[list[int], list[int]]:
    """(prompt ids, answer ids with EOS) of the `index`-th training question, within `model.max_length`.

    Args:
        wrong_share: of the examples, this share shows the answer to another question. A policy that learned from such
            demonstrations is right sometimes and knows more than it shows, which is where RL has something to do;
            a tiny model that learned from right ones only has nothing left in reserve.

    Raises:
        ConfigError: no question fits, or the task has no reference answers.
    """
    draw = keyed_random("wrong answers", index)
    wrong = draw.random() < wrong_share
    for attempt in range(MAX_SKIPS):
        item = task.train_item(index, attempt)
        if not item.answer:
            raise ConfigError([f"data.name: {task.name} has no reference answers, so it cannot be used for sft"])
        prompt = encode_prompt(tokenizer, item.question, config.data)
        shown = task.train_item(draw.randrange(2**20)) if wrong else item
        answer = encode_answer(tokenizer, shown.answer)
        if len(prompt) + len(answer) <= config.model.max_length:
            return prompt, answer
    raise ConfigError([f"model.max_length: {config.model.max_length} is too short for {MAX_SKIPS} questions in a row"])
