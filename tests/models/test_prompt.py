import re
import time
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny
from kvlink.core.document import Document
from kvlink.core.errors import EmptyQuestion, InputError, ModelRefused, TextUnavailable
from kvlink.models.prompt import Prompter

TOKENIZERS = {
    "bytes": tiny.byte_tokenizer(),
    "bytes, dated": tiny.byte_tokenizer(tiny.DATED),
    "bytes, no template": tiny.byte_tokenizer(None),
    "bpe, metaspace": tiny.metaspace_tokenizer("bpe"),
    "bpe, normalizer": tiny.metaspace_tokenizer("bpe", prefix="normalizer"),
    "unigram": tiny.metaspace_tokenizer("unigram"),
    "unigram, no template": tiny.metaspace_tokenizer("unigram", None),
}
PROMPTERS = {name: Prompter(tokenizer=tokenizer) for name, tokenizer in TOKENIZERS.items()}
CONTROL_STRINGS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>"]
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def chat(tokenizer, user, system=None):
    turns = [{"role": "system", "content": system}] if system is not None else []
    return tokenizer.apply_chat_template(
        [*turns, {"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
    )


# --- S and T ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [None, "Be brief.", ""])
@pytest.mark.parametrize("template", [tiny.CHATML, tiny.DATED], ids=["chatml", "dated"])
def test_pieces_of_harmless_text_are_the_ids_of_the_whole_chat(template, system):
    tokenizer = tiny.byte_tokenizer(template)
    prompter = Prompter(tokenizer=tokenizer)
    whole = tokenizer.encode(chat(tokenizer, "Why is it so?", system), add_special_tokens=False)
    assert [*prompter.system_ids(system), *prompter.tail_ids("Why is it so?")] == whole


@pytest.mark.parametrize("system", [None, "Be the best."])
@pytest.mark.parametrize("prefix", ["metaspace", "none"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_joined_pieces_read_back_as_the_rendered_chat_without_spaces_put_between(kind, prefix, system):
    tokenizer = tiny.metaspace_tokenizer(kind, prefix=prefix)
    prompter = Prompter(tokenizer=tokenizer)
    document = Document("The hen\n  sits.", title="the title")
    ids = [*prompter.system_ids(system), *prompter.document_ids(document), *prompter.tail_ids("the what?")]
    assert tokenizer.decode(ids) == chat(tokenizer, document.render() + "the what?", system)


@pytest.mark.parametrize("prefix", ["metaspace", "normalizer"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_no_space_is_put_before_a_document_however_the_tokenizer_would_do_it(kind, prefix):
    prompter, plain = (Prompter(tokenizer=tiny.metaspace_tokenizer(kind, prefix=p)) for p in (prefix, "none"))
    document = Document("the hen and </s>the cat")
    assert prompter.document_ids(document) == plain.document_ids(document)


def test_a_template_may_fold_the_system_prompt_into_the_users_turn():
    prompter = Prompter(tokenizer=tiny.metaspace_tokenizer(template=tiny.INST))
    assert "<<SYS>>" not in prompter.decode(prompter.system_ids())
    assert prompter.decode(prompter.system_ids("Be brief.")) == "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n"


def test_a_template_that_refuses_system_prompts_says_so_and_works_without():
    prompter = Prompter(tokenizer=tiny.byte_tokenizer(tiny.NO_SYSTEM))
    assert prompter.decode(prompter.system_ids()) == "user\n"
    with pytest.raises(InputError, match="System role not supported"):
        prompter.system_ids("Be brief.")


def test_a_template_that_drops_the_system_prompt_says_so():
    template = "{% for m in messages if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    prompter = Prompter(tokenizer=tiny.byte_tokenizer(template))
    with pytest.raises(InputError, match="drops it"):
        prompter.system_ids("Be brief.")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[-1]['content'] }} {{ messages[-1]['content'] }}", "2 times"),
        ("{{ messages[-1]['content'] | upper }}", "0 times"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_a_template_that_does_not_show_the_users_text_once_is_refused(template, reason):
    with pytest.raises(ModelRefused, match=reason):
        Prompter(tokenizer=tiny.byte_tokenizer(template))


def test_a_template_that_shows_the_system_prompt_behind_the_users_text_is_refused_with_one():
    template = "{{ messages[-1]['content'] }}{% if messages | length > 1 %}{{ messages[0]['content'] }}{% endif %}"
    prompter = Prompter(tokenizer=tiny.byte_tokenizer(template))
    with pytest.raises(ModelRefused, match="before the user's text"):
        prompter.system_ids("Be brief.")


def test_s_is_never_empty():
    assert Prompter(tokenizer=tiny.byte_tokenizer("{{ messages[-1]['content'] }}")).system_ids() == (1,)


def test_without_a_template_bos_opens_and_the_question_is_labelled():
    prompter = Prompter(tokenizer=tiny.byte_tokenizer(None))
    assert prompter.system_ids() == prompter.system_ids(" ") == (1,)
    assert prompter.decode(prompter.system_ids("Be brief.")) == "Be brief.\n\n"
    assert prompter.decode(prompter.tail_ids("Why?")) == "\nQuestion: Why?\nAnswer:"


def test_without_template_and_bos_a_newline_opens():
    prompter = Prompter(tokenizer=tiny.byte_tokenizer(None, bos=None))
    assert prompter.decode(prompter.system_ids()) == "\n"
    assert prompter.sink_ids("bos") == prompter.sink_ids("header") == prompter.system_ids()


def test_control_strings_of_the_template_are_control_ids_even_if_the_tokenizer_splits_them_by_default():
    tokenizer = tiny.byte_tokenizer()
    tokenizer.split_special_tokens = True
    assert Prompter(tokenizer=tokenizer).tail_ids("Hi")[2] == 2


# --- the sink prefix -------------------------------------------------------------------------------------------------


def test_the_header_sink_is_s_of_a_request_without_system_prompt():
    prompter = PROMPTERS["bytes"]
    assert prompter.sink_ids("header") == prompter.system_ids()
    assert (prompter.sink_ids("bos"), prompter.sink_ids("none")) == ((1,), ())


def test_the_header_sink_bears_one_date_and_s_bears_today():
    prompter = PROMPTERS["bytes, dated"]
    before, text, after = date.today(), prompter.decode(prompter.system_ids()), date.today()
    assert re.search(r"Date: (.*)\n", text)[1] in {f"{day:%d %b %Y}" for day in (before, after)}
    assert "Today Date: 26 Jul 2024\n" in prompter.decode(prompter.sink_ids("header"))


def test_s_is_rendered_again_on_a_new_day(monkeypatch):
    prompter = Prompter(tokenizer=tiny.byte_tokenizer(tiny.DATED))
    prompter.system_ids()
    rendered = []
    monkeypatch.setattr(
        prompter._template, "_render", lambda *_, **__: rendered.append(1) or "<|im_start|>kvlinkUserMarker"
    )
    prompter.system_ids()
    assert not rendered
    monkeypatch.setattr("kvlink.models.template.date", type("Tomorrow", (), {"today": lambda: date(2999, 1, 1)}))
    assert prompter.system_ids() == prompter.system_ids() == (1,)
    assert len(rendered) == 1


@pytest.mark.parametrize(("format_", "shown"), [("%Y-%m-%d", "2024-07-26"), ("%A, %B %d", "Friday, July 26")])
def test_the_constant_date_follows_the_templates_format(format_, shown):
    template = "{% macro head() %}{{ strftime_now('FORMAT') }}{% endmacro %}{{ head() }} {{ messages[0]['content'] }}"
    prompter = Prompter(tokenizer=tiny.byte_tokenizer(template.replace("FORMAT", format_)))
    assert prompter.decode(prompter.sink_ids("header")) == f"{shown} "


def test_an_unknown_sink_is_an_error_that_names_the_choice():
    with pytest.raises((InputError, TypeError), match="header"):  # the run-time checker may be there first
        PROMPTERS["bytes"].sink_ids("all")


# --- no control ids from users ---------------------------------------------------------------------------------------


@every_tokenizer
@pytest.mark.parametrize("control", CONTROL_STRINGS)
def test_control_strings_in_any_users_text_are_plain_text(name, control):
    prompter = PROMPTERS[name]
    text = f"a{control}b {control}{control}"

    def controls(ids):
        return [i for i in ids if i in prompter.control_ids]

    assert not controls(prompter.document_ids(Document(text, title=text)))
    assert controls(prompter.tail_ids(text)) == controls(prompter.tail_ids("harmless"))
    assert controls(prompter.system_ids(text)) == controls(prompter.system_ids("harmless"))


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    parts=st.lists(
        st.sampled_from([*CONTROL_STRINGS, "<", "/s>", "s>", "</", "|", " ", "▁", "the"]) | st.text(max_size=5)
    ),
)
def test_whatever_is_written_no_control_id_arises_and_the_text_reads_back(name, parts):
    prompter, text = PROMPTERS[name], "".join(parts)
    ids = prompter.document_ids(Document(f".{text}"))
    assert prompter.control_ids.isdisjoint(ids)
    written = Document(f".{text}").render()
    assert TOKENIZERS[name].decode(ids) == (written if name.startswith("bytes") else written.replace("▁", " "))


def test_added_tokens_count_as_control_even_if_they_are_not_special():
    tokenizer = tiny.byte_tokenizer(more=[AddedToken("<think>", special=False, normalized=True)])
    prompter = Prompter(tokenizer=tokenizer)
    (think,) = tokenizer.encode("<think>", add_special_tokens=False)
    assert think in prompter.control_ids
    assert think not in prompter.tail_ids("What does <think> mean?")


def test_added_runs_of_white_space_stay_ordinary_text_with_their_own_ids():
    more = [AddedToken("<think>", special=False), AddedToken("    ", special=False, normalized=False)]
    tokenizer = tiny.byte_tokenizer(more=more)
    prompter = Prompter(tokenizer=tokenizer)
    text = "if x:\n    return\n\n"
    assert list(prompter.document_ids(Document(text.strip()))) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids("    ") in prompter.document_ids(Document(text.strip()))


def test_unknown_characters_are_allowed_where_the_vocabulary_has_nothing_for_them():
    prompter = Prompter(tokenizer=tiny.metaspace_tokenizer("unigram", byte_fallback=False))
    assert prompter.control_ids == {1, 2}
    assert 0 in prompter.document_ids(Document("a ☃ b"))


def test_an_end_of_sequence_that_also_stands_for_unknown_characters_is_never_given_away():
    model = models.WordLevel({"</s>": 0, "<s>": 1, "\n": 2, "a": 3}, unk_token="</s>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(["<s>", "</s>"])
    prompter = Prompter(tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))
    assert prompter.document_ids(Document("aa")) == (3, 3, 2, 2)
    with pytest.raises(InputError, match="☃"):
        prompter.document_ids(Document("a☃"))


def test_a_control_token_of_one_character_cannot_be_written():
    tokenizer = tiny.metaspace_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["~"]})
    prompter = Prompter(tokenizer=tokenizer)
    with pytest.raises(InputError, match=r"'~'.*remove it"):
        prompter.tail_ids("about ~ 3")


# --- bad input -------------------------------------------------------------------------------------------------------


@every_tokenizer
@pytest.mark.parametrize("text", ["a\0b", "\ufeffab", "a\ud800b", "\r\n\t.", "e\u0301\u202e", "x" * 5000])
def test_odd_text_gives_ids_everywhere(name, text):
    prompter = PROMPTERS[name]
    assert prompter.document_ids(Document(text, title=text))
    assert prompter.tail_ids(text)
    assert prompter.system_ids(text)


@every_tokenizer
@pytest.mark.parametrize("question", ["", " \n\t", "\ufeff"])
def test_a_blank_question_is_an_error(name, question):
    with pytest.raises(EmptyQuestion):
        PROMPTERS[name].tail_ids(question)


def test_a_document_of_which_the_tokenizer_makes_nothing_is_an_error():
    backend = Tokenizer(models.BPE(vocab={"a": 0, "\n": 1}, merges=[]))
    backend.add_special_tokens(["<s>"])
    prompter = Prompter(tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))
    assert prompter.document_ids(Document("a")) == (0, 1, 1)
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.add_special_tokens(["<s>"])
    prompter = Prompter(tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))
    with pytest.raises(InputError, match="'report' gives no token ids"):
        prompter.document_ids(Document("b", name="report"))


@pytest.mark.parametrize("name", ["bytes", "bpe, normalizer", "unigram"])
@pytest.mark.parametrize("unit", ["the cat ", "a", "</s>", "\0"])
def test_the_time_grows_as_a_line_does_and_not_as_its_square(name, unit):
    def seconds(size):
        text = unit * (size // len(unit.encode()))
        start = time.process_time()
        assert PROMPTERS[name].control_ids.isdisjoint(PROMPTERS[name].document_ids(Document(text)))
        return time.process_time() - start

    short = min(seconds(20_000) for _ in range(3))
    assert any(seconds(200_000) < 30 * short for _ in range(3))  # the square would be 100 times as much


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_without_a_tokenizer_text_is_unavailable(tokenizer):
    with pytest.raises(TextUnavailable, match="pass token ids"):
        Prompter(tokenizer=tokenizer)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_answers_end_at_eos_at_the_templates_end_of_turn_and_where_the_generation_config_says():
    template = tiny.CHATML.replace("<|im_end|>", "<|endoftext|>")
    assert Prompter(tokenizer=tiny.byte_tokenizer(template), end_ids=(77,)).end_ids == (0, 2, 77)
    assert Prompter(tokenizer=tiny.metaspace_tokenizer()).end_ids == (2,)


def test_decoding_leaves_out_control_ids_and_ids_beyond_the_vocabulary():
    prompter = PROMPTERS["bytes"]
    assert prompter.decode([1, *prompter.label_ids(12), 2, 9999]) == "[12] "


def test_the_template_version_names_the_template():
    assert PROMPTERS["bytes"].template_version == Prompter(tokenizer=tiny.byte_tokenizer()).template_version
    assert PROMPTERS["bytes"].template_version != PROMPTERS["bytes, dated"].template_version
