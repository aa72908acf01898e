"""From prompts to scored samples: what rank 0 does between two updates."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from transformers import AutoTokenizer

from jetrl_megatron.batch import Sample
from jetrl_megatron.config import Config
from jetrl_megatron.data import CORRECT, Item, PromptStream, load_task
from jetrl_megatron.loss import group_advantages
from jetrl_megatron.rollout.pool import EnginePool
from jetrl_megatron.rollout.types import Completion, Sampling


class Sampler:
    """Draws prompts, lets the engines answer, scores. Every draw depends on (seed, step, prompt, sample) alone."""

    def __init__(self, config: Config, model_dir: Path, pool: EnginePool):
        self.config, self.pool = config, pool
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.task = load_task(config.data, config.train.seed)
        self.prompts = PromptStream(self.task, self.tokenizer, config)
        self.sampling = Sampling(
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_response_tokens,
            stop_token_ids=(self.tokenizer.eos_token_id,),
        )

    def sample(self, step: int, version: int) -> list[Sample]:
        """`prompts_per_step` x `group_size` scored answers of training step `step`, with group-relative advantages.

        Raises:
            RuntimeError: the engine answered with other weights than `version`.
        """
        grpo = self.config.grpo
        first = step * grpo.prompts_per_step
        prompts = [self.prompts.prompt(first + i) for i in range(grpo.prompts_per_step) for _ in range(grpo.group_size)]
        seeds = [_seed(self.config.train.seed, "train", step, i) for i in range(len(prompts))]
        answers = self.pool.generate([p.ids for p in prompts], seeds, self.sampling)
        samples = []
        for i, (prompt, answer) in enumerate(zip(prompts, answers)):
            if answer.version != version:
                raise RuntimeError(f"answer {i} was sampled by weights {answer.version}, the trainer is at {version}")
            samples.append(
                Sample(
                    prompt_ids=answer.prompt_ids,
                    response_ids=answer.token_ids,
                    engine_logp=answer.logprobs,
                    policy_version=answer.version,
                    group=i // grpo.group_size,
                    finish_reason=answer.finish_reason,
                    reward=self._reward(prompt.item, answer),
                )
            )
        advantages = group_advantages(
            torch.tensor([s.reward for s in samples], dtype=torch.float64),
            torch.tensor([s.group for s in samples]),
            std=grpo.advantage_std,
        )
        for sample, advantage in zip(samples, advantages.tolist()):
            sample.advantage = advantage
        return samples

    def evaluate(self) -> dict[str, float]:
        """`eval_pass_at_1`, and `eval_pass_at_K` where `data.eval_samples` = K > 1, on the held-out questions.

        pass@k is the unbiased estimate of Chen et al. (arXiv 2107.03374, eq. 1); with k = K it is "any is right".
        """
        per_question = self.config.data.eval_samples
        prompts = self.prompts.evaluation()
        jobs = [(i, k) for i in range(len(prompts)) for k in range(per_question)]
        seeds = [_seed(0, "eval", i, k) for i, k in jobs]
        answers = self.pool.generate([prompts[i].ids for i, _ in jobs], seeds, self.sampling)
        right = [0] * len(prompts)
        for (i, _), answer in zip(jobs, answers):
            right[i] += self.task.score(prompts[i].item, self._text(answer.token_ids)) >= CORRECT
        result = {"eval_pass_at_1": sum(right) / (len(prompts) * per_question)}
        if per_question > 1:
            found = sum(pass_at_k(per_question, correct, per_question) for correct in right)
            result[f"eval_pass_at_{per_question}"] = found / len(prompts)
        return result

    def _reward(self, item: Item, answer: Completion) -> float:
        if answer.finish_reason == "length" and not self.config.grpo.reward_truncated:
            return 0.0
        return self.task.score(item, self._text(answer.token_ids))

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of k answers drawn from n, `correct` of them right, is right: 1 - C(n-c, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _seed(*key: object) -> int:
    """A 31-bit seed from its key, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 33
