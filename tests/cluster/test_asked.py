"""What routing reads of requests and answers; no body, whatever it holds, stops it."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvlink.cluster.asked import (
    LONGEST,
    MOST_DOCUMENTS,
    UNKNOWN_TOKENS,
    Asked,
    Lengths,
    in_library,
    named,
    put_in,
    read,
    usage_in,
    usage_of,
)
from kvlink.server import protocol

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["documents", "messages", "role", "id", "text", "title"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.one_of(st.binary(max_size=40), json_values.map(lambda value: json.dumps(value).encode())))
def test_no_body_stops_it(body: bytes) -> None:
    Lengths().weighed(read(body))
    usage_of(body)
    usage_in(b"data: " + body)
    Lengths().learn(read(body), usage_of(body))


def test_a_document_has_one_name_however_it_is_given() -> None:
    assert named("a") == named({"id": "a"}) == ("id:a", None)
    assert named({"text": "x"}) == named({"text": "x", "title": ""}) == named({"text": "x", "title": None})
    names = [named({"text": "x"}), named({"text": "x", "title": "y"}), named({"text": "xy"}), named("x")]
    assert len(set(names)) == 4
    assert named({"text": "x", "id": "mine"}) == named({"text": "x"})
    assert put_in(b'{"documents": [{"id": "a", "text": "x"}, 5, {"text": "y"}]}') == ["id:a"]
    assert named(5) is None
    assert named({"title": "x"}) is None


def test_a_request_of_more_documents_than_servers_take_names_none() -> None:
    assert MOST_DOCUMENTS == protocol.MOST_DOCUMENTS

    def body(many: int) -> bytes:
        return json.dumps({"documents": [{"id": str(one)} for one in range(many)]}).encode()

    for names in (lambda body: read(body).documents, put_in):
        assert len(names(body(MOST_DOCUMENTS))) == MOST_DOCUMENTS
        assert len(names(body(MOST_DOCUMENTS + 1))) == 0


def test_names_are_short_however_long_a_client_makes_them() -> None:
    ids = ["a" * LONGEST, "a" * (LONGEST + 1), "a" * 100_000, "b" * 100_000]
    assert len({in_library(one) for one in ids}) == 4
    assert in_library(ids[0]) == f"id:{ids[0]}"
    for one in ids:
        body = json.dumps({"documents": [{"id": one}]}).encode()
        assert put_in(body) == [in_library(one)] == [name for name, _ in read(body).documents]
        assert len(in_library(one)) < 2 * LONGEST
    sessions = [read(b"{}", one).session for one in ids]
    assert len(set(sessions)) == 4
    assert all(len(one or "") < 2 * LONGEST for one in sessions)


def test_a_conversation_is_known_by_its_beginning_and_first_answer() -> None:
    def session(*texts: str) -> str | None:
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
        return read(json.dumps({"messages": messages}).encode()).session

    assert session("When?") is None
    assert session("When?", "At six.", "Why?") == session("When?", "At six.", "Why?", "So.", "Oh?") is not None
    assert session("When?", "At six.", "Why?") != session("When?", "At five.", "Why?")
    assert read(b'{"messages": []}', "mine").session == "mine"


def test_lengths_are_guessed_until_an_answer_tells_them() -> None:
    lengths, asked = Lengths(most=2), Asked((("text:a", 40), ("id:b", None), ("id:c", None)))
    assert [tokens for _, tokens in lengths.weighed(asked)] == [11, UNKNOWN_TOKENS, UNKNOWN_TOKENS]
    rows = [{"tokens": 7, "source": "host"}, {"tokens": 9, "source": "dropped"}, {"tokens": 8, "source": "encoded"}]
    held = lengths.learn(asked, {"kvlink": {"documents": rows}})
    assert held == ["text:a", "id:c"]
    assert [tokens for _, tokens in lengths.weighed(asked)] == [11, 9, 8], "the oldest length is forgotten"
    assert lengths.learn(asked, {"kvlink": {"documents": rows[:2]}}) == [], "rows that do not fit tell nothing"


def test_usage_is_found_at_the_end_of_a_stream() -> None:
    last = b'data: {"usage": {"kvlink": {}}}\n\ndata: [DONE]\n\n'
    assert usage_in(b'a tail {"usage"\n\n' + last) == {"kvlink": {}}
    assert usage_in(b'data: {"choices": []}\n\ndata: [DONE]\n\n') is None
