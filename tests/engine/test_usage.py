"""What a request says of itself: tokens, where each document came from, and how long each step took."""

from dataclasses import asdict
from pathlib import Path

import pytest
from engines import NEW, QUESTION, TEXTS, engine_of, prompt_of, read, with_links

from kvlink import Document, Engine
from kvlink.engine.prefiller import KNOWN_SYSTEMS
from kvlink.engine.usage import Answer, DocumentUsage, Usage


@pytest.fixture
def engine() -> Engine:
    return engine_of()


def ask(engine: Engine, docs: object = TEXTS, **options: object) -> Answer:
    return engine.generate(docs, QUESTION, **{"max_new_tokens": 2, **options})  # type: ignore[arg-type]


def lengths(engine: Engine) -> list[int]:
    return [len(ids) for ids in prompt_of(engine, TEXTS).segments]


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("num_links", [0, 3])
def test_prompt_tokens_are_all_ids_and_no_links(engine: Engine, labels: bool, num_links: int) -> None:
    answer = ask(with_links(engine, num_links), labels=labels)
    assert answer.usage.prompt_tokens == prompt_of(engine, TEXTS, labels=labels).num_tokens


@pytest.mark.parametrize("max_new_tokens", [1, 2, NEW])
def test_completion_tokens_are_the_ids_of_the_answer(engine: Engine, max_new_tokens: int) -> None:
    answer = ask(engine, max_new_tokens=max_new_tokens)
    assert answer.usage.completion_tokens == len(answer.ids) == max_new_tokens


def test_the_first_request_of_an_engine_caches_nothing(engine: Engine) -> None:
    assert ask(engine).usage.cached_tokens == 0


def test_encoded_documents_are_cached_when_s_is_not_known(engine: Engine) -> None:
    engine.encode(TEXTS)
    assert ask(engine).usage.cached_tokens == sum(lengths(engine))


def test_a_known_s_is_cached_too(engine: Engine) -> None:
    ask(engine)
    assert ask(engine).usage.cached_tokens == sum(lengths(engine)) + len(engine.prompter.system_ids())


def test_another_system_prompt_is_not_known(engine: Engine) -> None:
    ask(engine)
    assert ask(engine, system="Be brief.").usage.cached_tokens == sum(lengths(engine))


def test_a_forgotten_s_is_computed_again(engine: Engine) -> None:
    ask(engine)
    engine.forget_beginnings()
    assert ask(engine).usage.cached_tokens == sum(lengths(engine))


def test_the_s_that_was_used_longest_ago_is_forgotten_first(engine: Engine) -> None:
    ask(engine, TEXTS[:1])
    for number in range(KNOWN_SYSTEMS - 1):
        ask(engine, TEXTS[:1], system=f"Be brief, {number}.")
    ask(engine, TEXTS[:1])
    ask(engine, TEXTS[:1], system="Be briefer still.")
    assert ask(engine, TEXTS[:1]).usage.cached_tokens > lengths(engine)[0]
    assert ask(engine, TEXTS[:1], system="Be brief, 0.").usage.cached_tokens == lengths(engine)[0]


def test_computed_tokens_are_the_prompts_without_the_cached_ones_and_with_links(engine: Engine) -> None:
    engine.encode(TEXTS[:2])
    usage = ask(with_links(engine, 3)).usage
    assert usage.link_tokens == 3 * 3
    assert usage.computed_tokens == usage.prompt_tokens - sum(lengths(engine)[:2]) + 9


def test_a_document_that_comes_twice_is_cached_twice(engine: Engine) -> None:
    engine.encode(TEXTS)
    usage = ask(engine, [TEXTS[0], TEXTS[1], TEXTS[0]]).usage
    assert usage.cached_tokens == 2 * lengths(engine)[0] + lengths(engine)[1]


def test_without_reuse_nothing_is_cached_and_each_document_says_why(engine: Engine) -> None:
    engine.encode(TEXTS)
    ask(engine)
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=1, reuse=False)
    read(stream)
    usage = stream.answer.usage
    assert (usage.mode, usage.cached_tokens) == ("exact", 0)
    assert {(row.source, row.codec, row.reason) for row in usage.documents} == {
        ("computed", None, "computed in full, as asked")
    }


# --- documents ------------------------------------------------------------------------------------------------------


def test_each_document_has_a_row_in_the_requests_order(engine: Engine) -> None:
    engine.encode(TEXTS[1:2])
    rows = ask(engine).usage.documents
    first, second, third = lengths(engine)
    assert rows == (
        DocumentUsage("document 1", first, "encoded", None, "not in the store"),
        DocumentUsage("document 2", second, "host", "raw", ""),
        DocumentUsage("document 3", third, "encoded", None, "not in the store"),
    )


def test_a_document_from_a_folder_comes_from_disk(tmp_path: Path) -> None:
    engine = engine_of(store=tmp_path)
    sources = [[row.source for row in ask(engine).usage.documents] for _ in range(2)]
    assert sources == [["encoded"] * 3, ["disk"] * 3]


def test_labels_are_computed_and_belong_to_no_document(engine: Engine) -> None:
    engine.encode(TEXTS)
    usage = ask(engine, labels=True).usage
    assert usage.labels
    assert [row.tokens for row in usage.documents] == lengths(engine)
    assert usage.cached_tokens == sum(lengths(engine))


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ("It opens.", "document 2"),
        (Document("It opens."), "document 2"),
        (Document("It opens.", name="a.md"), "a.md"),
        ({"text": "It opens.", "name": "b.md"}, "b.md"),
        ({"text": "It opens.", "id": 17}, "17"),
        ({"text": "It opens.", "id": "x", "name": "c.md"}, "c.md"),
    ],
)
def test_a_row_carries_the_documents_name_or_its_number(engine: Engine, document: object, name: str) -> None:
    assert ask(engine, [TEXTS[0], document]).usage.documents[1].name == name


# --- JSON -----------------------------------------------------------------------------------------------------------


def test_the_json_has_exactly_the_fields_of_the_servers_usage() -> None:
    row = DocumentUsage("leave.md", 40, "disk", "raw", "")
    usage = Usage(100, 60, 6, 7, "documents", labels=True, documents=(row,))
    assert usage.to_json() == {
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 60},
        "kvlink": {
            "mode": "documents",
            "links": 6,
            "labels": True,
            "documents": [{"id": "leave.md", "tokens": 40, "source": "disk", "codec": "raw", "reason": ""}],
        },
    }


# --- timings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("docs", [(), TEXTS], ids=["none", "three"])
def test_no_step_takes_less_than_nothing_and_their_sum_is_at_most_the_time_to_the_first_token(
    engine: Engine, docs: tuple[str, ...]
) -> None:
    times = asdict(ask(engine, docs).timings)
    total, first = times.pop("total_s"), times.pop("ttft_s")
    assert min(times.values()) >= 0
    assert 0 < sum(times.values()) <= first <= total


def test_encoding_takes_time_only_where_something_is_encoded(engine: Engine) -> None:
    first, second = (ask(engine).timings for _ in range(2))
    assert first.encode_s > second.encode_s
    assert second.load_s > 0


def test_full_prefill_loads_and_rotates_nothing(engine: Engine) -> None:
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=1, reuse=False)
    read(stream)
    times = stream.answer.timings
    assert (times.load_s, times.encode_s, times.rotate_s) == (0, 0, 0)
    assert times.forward_s > 0
