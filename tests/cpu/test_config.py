"""Configuration: typed overrides, and every problem at once with the nearest valid name."""

from __future__ import annotations

import json

import pytest

from jetrl_megatron.config import Config, ConfigError, DataConfig, apply_overrides, flat_keys


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        apply_overrides(Config(), overrides).validate()
    return error.value.problems


def test_overrides_are_typed_by_the_field_that_they_name():
    config = apply_overrides(
        Config(),
        [
            "train.steps=3",
            "optimizer.lr=1e-4",
            "rollout.enforce_eager=true",
            "model.path=5",
            "data.options.max_terms=2",
        ],
    )
    assert (config.train.steps, config.optimizer.lr, config.rollout.enforce_eager) == (3, 1e-4, True)
    assert config.model.path == "5"
    assert config.data.options == {"max_terms": 2}


def test_another_data_set_does_not_inherit_the_fields_of_the_recipes():
    own = Config(data=DataConfig(name="reasoning_gym:a", options={"n": 1}, answer_field="solution", eval_size=5))
    data = apply_overrides(own, ["data.answer_field=reply", "data.name=mine.jsonl"]).data
    assert data == DataConfig(name="mine.jsonl", answer_field="reply", eval_size=5)
    assert apply_overrides(own, ["data.name=reasoning_gym:a"]).data == own.data


def test_all_problems_are_listed_with_the_nearest_names():
    found = problems("train.step=3", "precision.mode=jetlr", "train.seed=x", "optimizer.lr=nan", "nonsense", "steps=3")
    assert len(found) == 6
    assert "train.steps" in found[0] and "'jetrl'" in found[1] and "'sft.steps' or 'train.steps'" in found[5]


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("train.steps=0", "train.steps"),
        ("grpo.group_size=1", "group"),
        ("rollout.top_p=0.9", "top_p"),
        ("rollout.top_k=20", "top_k"),
        ("rollout.temperature=0", "temperature"),
        ("rollout.max_response_tokens=4096", "max_length"),
        ("parallel.sequence_parallel=true", "parallel.tp"),
        ("parallel.dp=7", "divide"),
        ("parallel.cp=2", "cp"),
        ("grpo.clip_low=1.5", "clip_low"),
        ("optimizer.beta2=1.0", "beta"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(override, word):
    assert any(word in problem for problem in problems(override))


def test_a_config_survives_json():
    config = apply_overrides(Config(), ["data.options.max_terms=2", "train.seed=7"])
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_key_in_a_saved_config_is_refused():
    values = Config().to_dict()
    values["train"]["stesp"] = 3
    with pytest.raises(ConfigError, match=r"train\.stesp.*steps"):
        Config.from_dict(values)


def test_every_key_can_be_set_to_its_own_default():
    values = Config().to_dict()
    for key in flat_keys():
        value = values
        for part in key.split("."):
            value = value[part]
        assert apply_overrides(Config(), [f"{key}={json.dumps(value)}"]) == Config()
