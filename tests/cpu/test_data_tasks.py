"""Tasks: deterministic by index, splits disjoint by text, scorers that pay for right answers only, errors that help."""

import json
import random
import subprocess
import sys

import numpy
import pytest

from jetrl_megatron.config import ConfigError, DataConfig
from jetrl_megatron.data import CORRECT, load_task
from jetrl_megatron.data.gym import GymTask
from jetrl_megatron.data.math_check import is_right, reference_answer
from jetrl_megatron.data.task import final_answer, held_out

GYM = ["chain_sum", "spell_backward", "countdown", "letter_counting", "number_sorting", "gsm_symbolic", "word_ladder",
       "acre", "list_functions", "tsumego", "power_function", "shortest_path"]  # fmt: skip


def gym(name="chain_sum", seed=0, **options):
    return GymTask(name, options, seed)


@pytest.fixture
def records():
    return [
        {"question": f"What is {i} + {i}?", "answer": f"We add {i} twice.\n#### {2 * i:,}"} for i in range(900, 1100)
    ]


@pytest.fixture
def jsonl(tmp_path, records):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize("name", GYM)
def test_any_gym_dataset_is_deterministic_disjoint_and_pays_its_own_answers(name):
    one, two = gym(name, seed=3), gym(name, seed=3)
    held = one.eval_items(6)  # draws of one object must not move those of the other
    forward = [one.train_item(i) for i in (0, 5, 1000003)]
    assert [two.train_item(i) for i in (1000003, 5, 0)] == forward[::-1]
    assert two.eval_items(6) == held and len({item.question for item in held}) == len(held) > 1
    assert all(held_out(item.question) for item in held) and not any(held_out(item.question) for item in forward)
    for item in forward:
        assert one.score(item, item.answer) == CORRECT
        assert one.score(item, f"let me see <answer> {item.answer} </answer>") == CORRECT
        assert one.score(item, "") < CORRECT and one.score(item, "no idea") < CORRECT


def test_seeds_share_no_stream_and_evaluation_ignores_the_seed():
    a, b = gym(seed=0), gym(seed=1)
    first = {a.train_item(i).question for i in range(50)}
    assert len(first) == 50
    assert not first & {b.train_item(i).question for i in range(50)}  # seed + index would shift the stream by one
    assert a.eval_items(10) == b.eval_items(10)


def test_other_processes_draw_the_same():
    code = (
        "from jetrl_megatron.data.gym import GymTask; t = GymTask('chain_sum', {}, 7);"
        "print([t.train_item(i).question for i in range(5)])"
    )
    there = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    task = GymTask("chain_sum", {}, 7)
    assert there.stdout.strip() == str([task.train_item(i).question for i in range(5)])


def test_attempts_are_substitutes():
    task = gym()
    assert task.train_item(4) == task.train_item(4, attempt=0) != task.train_item(4, attempt=1)
    assert task.train_item(4, attempt=1) == task.train_item(4, attempt=1)


def test_partial_credit_passes_and_broken_scorers_pay_nothing():
    task = gym("spell_backward")
    item = task.train_item(0)
    half = item.answer[:-1] + "_"
    assert 0 < task.score(item, half) < CORRECT
    integral = gym("simple_integration")
    item = integral.train_item(0)
    assert integral.score(item, "((((") < CORRECT


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("chain_sums", {}, "did you mean 'chain_sum'?"),
        ("chain_sum", {"min_term": 2}, "data.options.min_term: unknown option of chain_sum, did you mean 'min_terms'?"),
        ("chain_sum", {"seed": 2}, "data.options.seed: set by train.seed"),
        ("chain_sum", {"min_terms": "two"}, "'two' is not of type int"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "chain_sum refuses"),
        ("tsumego", {"min_board_size": 2}, "min_board_size must be at least 5"),
        ("composite", {}, "at least one dataset"),
    ],
)
def test_bad_gym_names_and_options_are_refused(name, options, says):
    with pytest.raises(ConfigError) as error:
        load_task(DataConfig(name=f"reasoning_gym:{name}", options=options), 0)
    assert says in str(error.value)


def test_all_bad_options_are_listed_at_once():
    with pytest.raises(ConfigError) as error:
        gym("chain_sum", min_term=1, max_digit=2)
    assert len(error.value.problems) == 2


def test_composite_takes_plain_objects():
    parts = [{"name": "chain_sum", "weight": 1, "config": {}}, {"name": "gsm_symbolic", "weight": 1, "config": {}}]
    task = gym("composite", datasets=parts)
    items = [task.train_item(i) for i in range(12)]
    assert {item.metadata["source_dataset"] for item in items} == {"chain_sum", "gsm_symbolic"}
    assert all(task.score(item, item.answer) == CORRECT for item in items)


def test_too_few_questions_for_two_splits():
    few = gym("gcd", min_numbers=2, max_numbers=2, min_value=1, max_value=2)  # 4 questions, none held out
    with pytest.raises(ConfigError, match="reasoning_gym:gcd has too few distinct questions for a held-out split"):
        few.eval_items(3)


def test_draws_leave_the_global_generators_alone():
    task = gym("pool_matrix")
    random.seed(1)
    numpy.random.seed(1)
    expected = random.random(), numpy.random.rand()
    random.seed(1)
    numpy.random.seed(1)
    task.train_item(0)
    assert (random.random(), numpy.random.rand()) == expected


def test_prefix_without_colon_is_explained():
    with pytest.raises(ConfigError, match="reasoning_gym:NAME"):
        load_task(DataConfig(name="reasoning_gym.chain_sum"), 0)


def test_jsonl_epochs_cover_everything_once(jsonl):
    task = load_task(DataConfig(name=str(jsonl)), 5)
    held = {item.question for item in task.eval_items(10**6)}
    size = 200 - len(held)
    epochs = [[task.train_item(e * size + i).question for i in range(size)] for e in range(2)]
    assert 0 < len(held) < 60
    assert len(set(epochs[0])) == size and set(epochs[0]) == set(epochs[1]) and epochs[0] != epochs[1]
    assert not held & set(epochs[0])
    again = load_task(DataConfig(name=str(jsonl)), 5)
    assert again.train_item(size + 3).question == epochs[1][3]
    assert load_task(DataConfig(name=str(jsonl)), 6).train_item(0) != task.train_item(0) or size < 2


def test_jsonl_with_a_held_out_file_drops_leaks(tmp_path, jsonl, records):
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records[:20]))
    task = load_task(DataConfig(name=str(jsonl), eval_split="held.jsonl"), 0)
    assert {i.question for i in task.eval_items(99)} == {r["question"] for r in records[:20]}
    seen = {task.train_item(i).question for i in range(180)}
    assert seen == {r["question"] for r in records[20:]}


def test_jsonl_errors_name_file_line_and_field(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_task(DataConfig(name=str(tmp_path / "missing.jsonl")), 0)
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "a", "anwser": "1"}\n\n{"question": \n[1]\n')
    with pytest.raises(ConfigError) as error:
        load_task(DataConfig(name=str(path)), 0)
    assert [p.split(": ", 1)[0] for p in error.value.problems] == [f"{path}:{n}" for n in (1, 3, 4)]
    assert "did you mean 'anwser'?" in error.value.problems[0]
    path.write_text('{"problem": "a", "answer": "1"}\n' * 20)
    with pytest.raises(ConfigError, match=r"data.question_field: .* has no field 'question' in any line, .*problem"):
        load_task(DataConfig(name=str(path)), 0)
    path.write_text('{"question": "a", "answer": "1"}\n')
    with pytest.raises(ConfigError):
        load_task(DataConfig(name=str(path)), 0)


def test_hugging_face_folder_and_saved_dataset(tmp_path, records, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    saved = tmp_path / "saved"
    parts = {"train": datasets.Dataset.from_list(records[:150]), "test": datasets.Dataset.from_list(records[150:])}
    datasets.DatasetDict(parts).save_to_disk(str(saved))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, rows in (("train", records[:150]), ("test", records[150:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for path in (saved, folder):
        task = load_task(DataConfig(name=str(path)), 0)
        assert len(task.eval_items(99)) == 50
        item = task.train_item(0)
        assert item.question in {r["question"] for r in records[:150]}
        assert task.score(item, f"so it is {reference_answer(item.answer)}.") == CORRECT
        assert task.score(item, "so it is 7.") == 0.0
    with pytest.raises(ConfigError) as error:
        load_task(DataConfig(name=str(saved), split="trian", eval_split="tset"), 0)
    assert "did you mean 'train'?" in error.value.problems[0] and "did you mean 'test'?" in error.value.problems[1]
    with pytest.raises(ConfigError, match="did you mean 'question'"):
        load_task(DataConfig(name=str(saved), question_field="qestion"), 0)
    with pytest.raises(ConfigError, match="did you mean 'name'"):
        load_task(DataConfig(name=str(saved), options={"nam": "main"}), 0)
    with pytest.raises(ConfigError, match="cannot load"):
        load_task(DataConfig(name=str(tmp_path / "nowhere")), 0)


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("6 * 7 = 42\n#### 42", "It is 42", True),
        ("#### 42", "40 + 2 = 42\n#### 42", True),
        ("#### 1,234", "1234", True),
        ("#### 1234", "The answer is 1,234.", True),
        ("#### 42", "41", False),
        ("#### 42", "", False),
        ("#### 42", "I do not know", False),
        ("#### 42", "42 at first, then <answer>43</answer>", False),
        ("1/2", "0.5", True),
        ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}", True),
        ("-3", "-3", True),
        ("-3", "3", False),
        ("x^2+1", "$1+x^2$", True),
        ("Paris", "Paris", True),
        ("Paris", "London", False),
    ],
)
def test_math_check(answer, response, right):
    assert is_right(answer, response) is right


def test_math_check_works_outside_the_main_thread():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(is_right, "#### 42", "that makes 42 apples").result()


def test_final_answer():
    assert final_answer(" 42\n") == "42"
    assert final_answer("<answer>1</answer> no, <answer> 2 </answer>") == "2"
    assert final_answer("<answer>cut off") == "<answer>cut off"
