"""Model text that reaches an evaluating scorer: arithmetic passes, programs and number bombs do not."""

import time

import pytest

from jetrl_megatron.data.expressions import MAX_LENGTH, evaluates, harmless, time_limit
from jetrl_megatron.data.gym import GymTask

GOOD = """
[1, 2, 3]
['a', 'b']
1 2 3
(3 + 4) * 5 - 2
x**2/2 + C
x^3/3 + sin(x)*exp(2*x) + C
-2*x**4*y**2 + 3*x**2 - 1
5*x*(x+1)
(x**2 + 1)**3
[[0, 1], [1, 0]]
log(x)**2
x**n
(9**9)**9
hello world
""".strip().splitlines()

BAD = """
__import__('os').system('touch /tmp/x')
open('/etc/passwd').read()
().__class__.__base__
[x for x in ()]
lambda: 1
exec('1')
9**9**9
9**(9**9)
((9**99)**99)**99
10^99999999
2**(999*999*99)
99999!
factorial(99999)
'a'*10**9
[0]*10**10
a[0]
_x
""".strip().splitlines()


@pytest.mark.parametrize("text", GOOD)
def test_arithmetic_is_harmless(text):
    assert harmless(text)


@pytest.mark.parametrize("text", BAD)
def test_programs_and_bombs_are_not(text):
    assert not harmless(text)


def test_long_and_deep_text():
    assert not harmless("1+" * MAX_LENGTH + "1")
    assert harmless("(" * 2000 + "9**9**9" + ")" * 2000)  # deeper than the parser goes: eval refuses it as well
    assert harmless("1" * 4000 + " is no expression")


def test_scorers_that_evaluate_are_known():
    evaluating = {"countdown", "puzzle24", "spiral_matrix", "n_queens", "polynomial_multiplication"}
    plain = {"chain_sum", "spell_backward", "letter_counting"}
    assert {name for name in evaluating | plain if GymTask(name, {}, 0)._evaluates} == evaluating


def test_builtin_scorers_count_as_evaluating():
    assert evaluates(len)


@pytest.mark.parametrize("name", ["spiral_matrix", "countdown"])
def test_no_code_of_an_answer_runs(name, tmp_path):
    task = GymTask(name, {}, 0)
    item, mark = task.train_item(0), tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    for text in (code, f"[{code}]", f"[[{code}]]"):
        assert task.score(item, text) < 1.0
    assert not mark.exists()
    assert task.score(item, item.answer) == 1.0


@pytest.mark.parametrize("name", ["n_queens", "string_insertion", "binary_matrix", "polynomial_multiplication"])
def test_right_answers_pass_the_guard(name):
    task = GymTask(name, {}, 0)
    for i in range(5):
        item = task.train_item(i)
        assert task.score(item, item.answer) == 1.0


def test_a_scorer_that_hangs_is_cut_off(monkeypatch):
    from jetrl_megatron.data import gym

    monkeypatch.setattr(gym, "SCORE_SECONDS", 0.2)
    task = GymTask("chain_sum", {}, 0)
    monkeypatch.setattr(task._dataset, "score_answer", lambda answer, entry: time.sleep(30))
    started = time.perf_counter()
    assert task.score(task.train_item(0), "1") == 0.0 and task.scorer_errors == 1
    assert time.perf_counter() - started < 5


def test_time_limit_gives_the_signal_back():
    import signal

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError), time_limit(0.05):
        time.sleep(5)
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
