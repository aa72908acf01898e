"""Which texts of a model may reach a scorer that evaluates them.

A dozen reasoning-gym scorers hand the answer to Python's `eval` or to sympy's `parse_expr`, which evals too. A policy
samples anything, so it may sample a call, or a power that takes hours; neither may run inside a training process.
"""

from __future__ import annotations

import ast
import inspect
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FUNCTIONS = (
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs abs Rational Integer"
)
FUNCTIONS = frozenset(_FUNCTIONS.split())
"""What an answer may call."""

MAX_DIGITS = 2000
"""Upper bound on the digits of any number that an answer may compute."""

MAX_LENGTH = 5000

_EVALUATES = re.compile(r"(?<![\w.])eval\(|parse_expr\(|sympify\(")


class _Unsafe(Exception):
    """The expression does something that is not arithmetic, or makes huge numbers."""


def evaluates(scorer: Any) -> bool:
    """Whether the source of a scorer (a function) evaluates text; True if it cannot be read."""
    try:
        return bool(_EVALUATES.search(inspect.getsource(scorer)))
    except (OSError, TypeError):
        return True


def harmless(text: str) -> bool:
    """Whether evaluating `text` only computes with numbers, symbols and lists, and ends soon.

    Text that is no expression at all is harmless: evaluating it is a syntax error. `^` counts as a power, as some
    scorers read it. A factorial sign is refused, since sympy reads it and Python's grammar does not.
    """
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return False
    for reading in {text, text.replace("^", "**")}:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(reading, mode="eval")
            _digits(tree.body)
        except (SyntaxError, ValueError):  # ValueError: null bytes, or an integer of more than 4300 digits
            if "!" in text or "__" in text:
                return False
        except (_Unsafe, RecursionError, MemoryError):
            return False
    return True


def _digits(node: ast.expr) -> float:
    """A bound on the digits of a number that `node` computes; symbols count as one. Raises _Unsafe."""
    match node:
        case ast.Constant(value=bool() | int() | float() | complex()):
            return float(len(str(node.value)))
        case ast.Constant(value=str() | None):
            return 1.0
        case ast.Name(id=name) if not name.startswith("_"):
            return 1.0
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return max((_digits(item) for item in items), default=1.0)
        case ast.Dict(keys=keys, values=values):
            return max((_digits(item) for item in [*keys, *values] if item is not None), default=1.0)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _digits(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return max((_digits(arg) for arg in args), default=1.0)
        case ast.BinOp(left=left, op=op, right=right) if _number(left) and _number(right):
            found = _combined(_digits(left), op, _digits(right), right)
            if found > MAX_DIGITS:
                raise _Unsafe
            return found
        case _:
            raise _Unsafe


def _number(node: ast.expr) -> bool:
    """Not a list or a text, which a product would repeat."""
    return not isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict) and not (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _combined(left: float, op: ast.operator, right: float, exponent: ast.expr) -> float:
    match op:
        case ast.Add() | ast.Sub() | ast.BitXor():
            return max(left, right) + 1
        case ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod():
            return left + right
        case ast.Pow():
            if any(isinstance(part, ast.Name) for part in ast.walk(exponent)):
                return left + right  # stays a symbol
            if right > 5:  # more than five digits of exponent
                raise _Unsafe
            number = exponent.value if isinstance(exponent, ast.Constant) else None
            return left * (abs(number) if isinstance(number, int | float) else 10**right)
        case _:
            raise _Unsafe


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`; no effect outside the main thread, which has the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
