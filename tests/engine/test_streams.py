"""An answer in pieces: nothing half, nothing of a stop string, nothing lost; and what happens when a reader leaves."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pytest
import torch
from engines import NEW, QUESTION, TEXTS, engine_of, read
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlink import Engine, InputError
from kvlink.core.layout import Prompt
from kvlink.engine.detokeniser import Detokeniser
from kvlink.engine.job import Job
from kvlink.engine.request import Request
from kvlink.engine.sampling import MAX_NEW_TOKENS, Sampler, SamplingParams
from kvlink.engine.stream import Prefilled, Stream, decoded
from kvlink.engine.task import Task
from kvlink.engine.usage import Timings, Usage
from kvlink.models.cache import SlotCache

END = 256
LETTERS = st.text("ab€😀é", min_size=0, max_size=12)


@pytest.fixture
def engine() -> Engine:
    return engine_of()


def row_of(token: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), 257).float()


def bytes_to_text(ids: list[int]) -> str:
    return bytes(token for token in ids if token != END).decode("utf-8", "replace")


def recite(said: bytes, *, stop: Sequence[str] = (), room: int = 1000, end: bool = True) -> Stream:
    """Stream an answer of which every byte is a token."""
    script = [*said, END] if end else [*said]
    left = iter(script[1:])

    @contextmanager
    def prompt() -> Generator[Prefilled]:
        cache = SlotCache(torch.empty(1, 1, 0, 1), torch.empty(1, 1, 0, 1))
        yield Prefilled(cache, row_of(script[0])[None], room, Usage(1, 0, 0, 0, "exact"), Timings())

    params = SamplingParams(max_new_tokens=room, stop=tuple(stop))
    prompts = Prompt((1,), (), (2,))
    job = Task(
        Request(prompts, (), (), ()), Sampler(params), Detokeniser(bytes_to_text, stop), end_ids=frozenset({END})
    )
    return Stream(decoded(prompt(), job, decode=lambda _, __: row_of(next(left))))


# --- pieces ---------------------------------------------------------------------------------------------------------


@given(said=LETTERS)
@settings(max_examples=50)
def test_pieces_join_to_the_answers_text(said: str) -> None:
    stream = recite(said.encode())
    assert "".join(stream) == stream.answer.text == said


@given(said=LETTERS)
@settings(max_examples=50)
def test_no_piece_holds_half_a_character(said: str) -> None:
    assert "\ufffd" not in "".join(read(recite(said.encode())))


def test_a_character_is_shown_once_it_is_whole() -> None:
    assert read(recite("a€b".encode())) == ["a", "€", "b"]


def test_half_a_character_at_the_very_end_is_shown_as_a_replacement() -> None:
    stream = recite("a€".encode()[:-1], room=3, end=False)
    assert "".join(stream) == stream.answer.text == "a\ufffd"


def test_bytes_that_are_no_character_hold_up_nothing_behind_them() -> None:
    stream = recite(b"a\xff\xfeb")
    assert "".join(stream) == stream.answer.text == "a\ufffd\ufffdb"


@pytest.mark.parametrize("docs", [(), TEXTS], ids=["none", "three"])
def test_pieces_of_a_models_answer_join_to_its_text(engine: Engine, docs: tuple[str, ...]) -> None:
    stream = engine.stream(docs, QUESTION, max_new_tokens=40)
    pieces = read(stream)
    assert "".join(pieces) == stream.answer.text == engine.prompter.decode(stream.answer.ids)
    assert len(pieces) > 5


def test_a_stream_and_generate_give_the_same_answer(engine: Engine) -> None:
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=NEW)
    read(stream)
    assert stream.answer.ids == engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids


def test_a_stream_that_was_read_stays_at_its_end(engine: Engine) -> None:
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=2)
    read(stream)
    assert read(stream) == []


# --- the end --------------------------------------------------------------------------------------------------------


def test_an_end_id_ends_the_answer_and_is_counted_but_not_shown() -> None:
    stream = recite(b"ab")
    read(stream)
    assert (stream.answer.text, stream.answer.ids, stream.answer.finish_reason) == ("ab", (97, 98, END), "stop")
    assert stream.answer.usage.completion_tokens == 3


def test_an_answer_may_end_at_once() -> None:
    stream = recite(b"")
    assert read(stream) == []
    assert (stream.answer.text, stream.answer.ids, stream.answer.finish_reason) == ("", (END,), "stop")


def test_an_answer_without_an_end_has_the_length_that_was_asked_for() -> None:
    stream = recite(b"abcdef", room=4)
    read(stream)
    assert (stream.answer.text, stream.answer.finish_reason) == ("abcd", "length")


def test_the_models_own_end_of_turn_ends_an_answer(engine: Engine) -> None:
    ids = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids
    ending = engine_of()
    ending._end_ids = frozenset({ids[3]})
    answer = ending.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    assert (answer.ids, answer.finish_reason) == (ids[: ids.index(ids[3]) + 1], "stop")


def test_length_and_stop_strings_of_sampling_hold_unless_more_is_said_beside_it(engine: Engine) -> None:
    sampling = SamplingParams(max_new_tokens=7, stop=("one",))
    said = engine.job(TEXTS, QUESTION, sampling=sampling).sampler.params
    assert (said.max_new_tokens, said.stop) == (7, ("one",))
    said = engine.job(TEXTS, QUESTION, sampling=sampling, max_new_tokens=3, stop="two").sampler.params
    assert (said.max_new_tokens, said.stop) == (3, ("one", "two"))
    assert engine.job(TEXTS, QUESTION).sampler.params.max_new_tokens == MAX_NEW_TOKENS


def test_a_job_that_no_engine_made_is_refused(engine: Engine) -> None:
    with pytest.raises(InputError, match=r"not made by Engine\.job"):
        engine.submit(Job())


# --- stop strings ---------------------------------------------------------------------------------------------------


@given(said=LETTERS, stop=st.lists(st.text("ab€😀é", min_size=1, max_size=3), max_size=3))
@settings(max_examples=300)
def test_an_answer_is_cut_before_the_first_stop_string_and_nothing_else_is_ever_shown(
    said: str, stop: list[str]
) -> None:
    ends = [said[: at + len(string)] for string in stop for at in range(len(said)) if said.startswith(string, at)]
    first = min(ends, key=len, default=None)
    cut = said if first is None else first[: min(first.find(string) for string in stop if string in first)]
    stream = recite(said.encode(), stop=stop)
    assert "".join(stream) == stream.answer.text == cut


def test_the_beginning_of_a_stop_string_is_shown_when_it_goes_on_otherwise() -> None:
    assert read(recite(b"a##b", stop=["###"])) == ["a", "##b"]


def test_a_stop_string_that_ends_in_a_long_character_is_not_shown_while_that_is_half_there() -> None:
    stream = recite("ab€".encode(), stop=["b€"])
    assert read(stream) == ["a"]


def test_a_stop_string_of_a_request_cuts_the_models_answer(engine: Engine) -> None:
    whole = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).text
    answer = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW, stop=whole[4:6])
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(whole[4:6])], "stop")


@pytest.mark.parametrize("stop", ["", (), ["", ""]], ids=repr)
def test_an_empty_stop_string_stops_nothing(engine: Engine, stop: str | list[str]) -> None:
    answer = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW, stop=stop)
    assert answer.finish_reason == "length"


# --- readers that leave, ask twice, or come too early ---------------------------------------------------------------


def test_an_answer_is_not_there_before_the_end(engine: Engine) -> None:
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=NEW)
    next(stream)
    with pytest.raises(InputError, match="read to its end"):
        _ = stream.answer


def test_a_closed_stream_has_no_answer(engine: Engine) -> None:
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=NEW)
    next(stream)
    stream.close()
    assert read(stream) == []
    with pytest.raises(InputError, match="read to its end"):
        _ = stream.answer


def test_closing_a_stream_gives_its_buffer_to_the_next_prompt(engine: Engine) -> None:
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=NEW)
    next(stream)
    assert engine.assembler._spare is None
    stream.close()
    buffer = engine.assembler._spare
    engine.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    assert buffer is not None
    assert engine.assembler._spare is buffer


def test_an_engine_answers_on_behind_a_closed_stream(engine: Engine) -> None:
    wanted = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids
    stream = engine.stream(TEXTS[:1], "Why?", max_new_tokens=NEW)
    next(stream)
    stream.close()
    assert engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids == wanted


def test_a_stream_that_was_never_begun_can_be_closed(engine: Engine) -> None:
    engine.stream(TEXTS, QUESTION).close()
    assert engine.store.stats().puts == 0


def test_a_question_in_the_middle_of_a_stream_disturbs_neither(engine: Engine) -> None:
    outer_alone = engine.generate(TEXTS, QUESTION, max_new_tokens=NEW).ids
    inner_alone = engine.generate(TEXTS[1:], "Why?", max_new_tokens=NEW).ids
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=NEW)
    inner = [engine.generate(TEXTS[1:], "Why?", max_new_tokens=NEW).ids for _ in stream]
    assert stream.answer.ids == outer_alone
    assert set(inner) == {inner_alone}


def test_two_streams_may_be_read_in_turn(engine: Engine) -> None:
    alone = [engine.generate(TEXTS, question, max_new_tokens=NEW).text for question in ("Why?", QUESTION)]
    streams = [engine.stream(TEXTS, question, max_new_tokens=NEW) for question in ("Why?", QUESTION)]
    texts = ["", ""]
    for _ in range(NEW + 1):
        for number, stream in enumerate(streams):
            texts[number] += next(stream, "")
    assert texts == alone
