"""Prompts: one BOS whoever writes it, no invented EOS, questions that are too long are replaced and counted."""

import pytest
from transformers import AutoTokenizer

from jetrl_megatron.config import Config, ConfigError, DataConfig
from jetrl_megatron.data import Item, PromptStream, encode_answer, encode_prompt, supervised_example
from jetrl_megatron.tiny import make_tiny_tokenizer

WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
WITH_EOS = WITHOUT_BOS + "{{ eos_token }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(path)
    return path


@pytest.fixture
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


class Questions:
    """A task whose question i has i + 1 characters, the last one telling the attempt."""

    name = "questions"

    def train_item(self, index, attempt=0):
        return Item(question="a" * index + "bcdefgh"[attempt % 7] if attempt < 3 else "x", answer="42")

    def eval_items(self, count):
        return [self.train_item(i) for i in range(count)]

    def score(self, item, response):
        return float(response == item.answer)


@pytest.mark.parametrize("template", [None, WITH_BOS, WITHOUT_BOS, WITH_EOS])
def test_exactly_one_bos(tokenizer, template):
    tokenizer.chat_template = template
    ids = encode_prompt(tokenizer, "2 + 2 =", DataConfig(chat_template=template is not None))
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == "2 + 2 =\n"
    # An EOS that a template writes closes a turn; nobody adds one.
    assert ids.count(tokenizer.eos_token_id) == (template == WITH_EOS)


def test_tokenizer_that_appends_eos_does_not_close_the_prompt(tokenizer):
    from tokenizers import processors

    specials = [(t, tokenizer.convert_tokens_to_ids(t)) for t in (tokenizer.bos_token, tokenizer.eos_token)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A {tokenizer.eos_token}", special_tokens=specials
    )
    assert tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id
    ids = encode_prompt(tokenizer, "a", DataConfig())
    assert ids[0] == tokenizer.bos_token_id and tokenizer.eos_token_id not in ids
    assert encode_answer(tokenizer, "a") == [*encode_answer(tokenizer, "a")[:-1], tokenizer.eos_token_id]
    assert encode_answer(tokenizer, "a").count(tokenizer.eos_token_id) == 1


def test_tokenizer_without_bos(tokenizer):
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.bos_token = None
    assert tokenizer.decode(encode_prompt(tokenizer, "aa", DataConfig())) == "aa\n"


def test_missing_template_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.chat_template"):
        encode_prompt(tokenizer, "a", DataConfig(chat_template=True))


def test_answers_end_in_eos(tokenizer):
    assert tokenizer.convert_ids_to_tokens(encode_answer(tokenizer, "-28")) == ["-", "2", "8", tokenizer.eos_token]


def test_long_questions_are_replaced_and_counted(tokenizer):
    config = Config()
    config.model.max_length, config.rollout.max_response_tokens = 20, 8  # room for BOS, ten characters and a line end
    config.grpo.prompts_per_step = 6
    stream = PromptStream(Questions(), tokenizer, config)
    prompts = stream.step(1)  # questions 6 to 11, of 7 to 12 characters
    assert [len(p.item.question) for p in prompts] == [7, 8, 9, 10, 1, 1]
    assert stream.skipped == 6 and all(len(p.ids) <= 12 for p in prompts)
    again = PromptStream(Questions(), tokenizer, config)
    assert again.prompt(10) == prompts[4]  # whatever was asked before
    config.data.eval_size = 15
    assert [len(p.item.question) for p in again.evaluation()] == list(range(1, 11))
    assert again.skipped == 3 + 5


def test_no_question_fits(tokenizer):
    config = Config()
    config.model.max_length, config.rollout.max_response_tokens = 10, 8
    stream = PromptStream(Questions(), tokenizer, config)
    with pytest.raises(ConfigError, match=r"1000 questions in a row need 3 prompt tokens.*leaves 2"):
        stream.prompt(0)
    with pytest.raises(ConfigError, match="every held-out question needs 3"):
        stream.evaluation()


def test_supervised_examples(tokenizer):
    config = Config()
    config.model.max_length = 12
    prompt, answer = supervised_example(Questions(), tokenizer, config, 3)
    assert tokenizer.decode(prompt, skip_special_tokens=True) == "aaab\n"
    assert tokenizer.decode(answer) == "42" + tokenizer.eos_token
    assert (
        tokenizer.decode(supervised_example(Questions(), tokenizer, config, 11)[0], skip_special_tokens=True) == "x\n"
    )

    class NoAnswers(Questions):
        def train_item(self, index, attempt=0):
            return Item(question="a", answer="")

    with pytest.raises(ConfigError, match="no reference answers"):
        supervised_example(NoAnswers(), tokenizer, config, 0)


def test_wrong_demonstrations_come_as_often_as_asked_and_always_the_same(tokenizer):
    class Numbers(Questions):
        def train_item(self, index, attempt=0):
            return Item(question=f"{index % 1000}?", answer=str(index % 1000))

    def right(i, share):
        prompt, answer = supervised_example(Numbers(), tokenizer, Config(), i, share)
        return tokenizer.decode(prompt[1:-2]) == tokenizer.decode(answer[:-1])

    assert all(right(i, 0.0) for i in range(100)) and sum(right(i, 1.0) for i in range(100)) < 3
    some = [right(i, 0.4) for i in range(400)]
    assert 210 < sum(some) < 270 and some == [right(i, 0.4) for i in range(400)]
