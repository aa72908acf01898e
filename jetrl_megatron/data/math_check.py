"""Checking free-form answers against a reference with math-verify (GSM8K's `#### 42` format included)."""

from __future__ import annotations

import logging
import threading

from jetrl_megatron.data.task import final_answer

GSM8K_MARK = "####"
LIMIT_SECONDS = 5


def reference_answer(answer: str) -> str:
    """What follows the last `####` of a worked solution, without thousands separators; else the whole text."""
    _, mark, last = answer.rpartition(GSM8K_MARK)
    return last.strip().replace(",", "") if mark else answer.strip()


def is_right(answer: str, response: str) -> bool:
    """Whether the response's final answer equals the reference answer.

    Equal text counts at once. Otherwise math-verify parses both (LaTeX, boxed, plain numbers, fractions, units) and
    compares their values; text that it cannot parse is wrong.

    Args:
        answer: reference, maybe a worked solution ending in `#### 42`.
        response: the model's whole text; the last `<answer>` tag or `####` line in it counts if there is one.
    """
    gold = reference_answer(answer)
    said = reference_answer(final_answer(response))
    if not said:
        return False
    if said == gold:
        return True
    import math_verify

    # math-verify limits its time with SIGALRM, which only a main thread may set.
    limit = LIMIT_SECONDS if threading.current_thread() is threading.main_thread() else None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # A bare number is not "LaTeX": offer the gold value both plain and as $...$, whichever parses.
    golds = math_verify.parse(gold, parsing_timeout=limit) or math_verify.parse(f"${gold}$", parsing_timeout=limit)
    return bool(math_verify.verify(golds, math_verify.parse(said, parsing_timeout=limit), timeout_seconds=limit))
