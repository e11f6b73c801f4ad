"""Tenants: what one brings, no other one finds; shared documents are for those who are granted them; limits hold."""

import hashlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live import MODEL, Live, live, tiny_engine, until

from kvlink.core.errors import InputError
from kvlink.core.fingerprint import SHARED
from kvlink.engine.library import Library
from kvlink.server.auth import Keys
from kvlink.server.served import Served
from kvlink.server.tenants import OPERATOR, Pace, Tenant, granted, scope_of

TEXT = "The office opens at seven."
QUESTION = "When does it open?"
ROWS: list[dict[str, Any]] = [
    {"tenant": "acme", "sha256": hashlib.sha256(b"a-key").hexdigest(), "quota_mb": 0.2},
    {"tenant": "bolt", "sha256": hashlib.sha256(b"b-key").hexdigest(), "shared": False},
    {"tenant": "slow", "sha256": hashlib.sha256(b"s-key").hexdigest(), "requests_per_minute": 1},
]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("library")
    keys = Keys(["o-key"], granted(ROWS, secret=b"secret"))
    with tiny_engine(folder / "entries") as engine, Library(folder, engine) as library:
        library.put("common", TEXT)
        served = Served(engine=engine, library=library, model=MODEL, tenants=keys.tenants)
        with live(served, key="o-key", keys=keys) as one:
            yield one


def client(server: Live, key: str) -> openai.OpenAI:
    return server.openai.with_options(api_key=key)


def ask(server: Live, key: str, *documents: Any, question: str = QUESTION) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    return client(server, key).chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1, extra_body={"documents": list(documents)}
    )


def source(found: Any) -> str:
    (row,) = found.usage.kvlink["documents"]
    return row["source"]


def send(server: Live, key: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    return server.send(method, path, body, authorization=f"Bearer {key}")[:2]


@pytest.mark.enable_socket
def test_what_a_tenant_brought_is_a_hit_for_it_and_for_nobody_else(house: Live) -> None:
    """Paired: the same request by the same tenant, and by another one."""
    own = {"text": "Only acme knows that the vault is behind the map."}
    assert source(ask(house, "a-key", own)) == "encoded"
    assert source(ask(house, "a-key", own)) == "device"
    assert source(ask(house, "b-key", own)) == "encoded"
    assert source(ask(house, "o-key", own)) == "encoded"


@pytest.mark.enable_socket
def test_known_beginnings_are_a_tenants_own(house: Live) -> None:
    """A prompt that another tenant has sent before costs as much as one that nobody has sent."""

    def cached(key: str, question: str) -> int:
        return ask(house, key, question=question).usage.prompt_tokens_details.cached_tokens

    for key in ("a-key", "b-key"):
        cached(key, "Who knows how prompts begin?")
    first, again = (cached("a-key", "What is the plan of acme for the autumn?") for _ in range(2))
    assert again > first
    assert cached("b-key", "What is the plan of acme for the autumn?") <= first


@pytest.mark.enable_socket
def test_shared_documents_are_computed_once_for_all_who_are_granted_them(house: Live) -> None:
    until(lambda: send(house, "o-key", "GET", "/v1/documents")[1]["data"][0]["status"] == "ready")
    ask(house, "o-key", "common")
    assert source(ask(house, "a-key", "common")) == "device"
    question = "What does acme ask about the common one?"
    before = [
        ask(house, key, "common", question=question).usage.prompt_tokens_details.cached_tokens
        for key in ("a-key", "a-key", "o-key")
    ]
    assert before[1] > before[0]
    assert before[2] <= before[0]
    with pytest.raises(openai.NotFoundError):
        ask(house, "b-key", "common")
    assert send(house, "a-key", "GET", "/v1/documents/common")[1]["text"] == TEXT
    assert send(house, "b-key", "GET", "/v1/documents/common")[0] == 404


@pytest.mark.enable_socket
def test_ids_are_a_tenants_own(house: Live) -> None:
    for key, text in (("a-key", "Acme closes at five."), ("b-key", "Bolt closes at nine.")):
        assert send(house, key, "PUT", "/v1/documents/hours", {"text": text})[0] == 201
    assert send(house, "a-key", "GET", "/v1/documents/hours")[1]["text"] == "Acme closes at five."
    assert send(house, "b-key", "GET", "/v1/documents/hours")[1]["text"] == "Bolt closes at nine."
    assert "common" not in [row["id"] for row in send(house, "b-key", "GET", "/v1/documents")[1]["data"]]
    assert send(house, "b-key", "DELETE", "/v1/documents/hours")[0] == 200
    assert send(house, "b-key", "DELETE", "/v1/documents/hours")[0] == 404
    assert send(house, "a-key", "DELETE", "/v1/documents/common")[0] == 404, "it may read it, no more"
    assert source(ask(house, "a-key", "hours")) in ("device", "host", "disk", "encoded")
    assert send(house, "b-key", "GET", "/v1/library")[1]["near_duplicates"] == []


@pytest.mark.enable_socket
def test_a_quota_holds_for_what_is_kept(house: Live) -> None:
    big = {"text": "The office opens at seven. " * 16}
    assert send(house, "b-key", "PUT", "/v1/documents/big", big)[0] == 201
    status, body = send(house, "a-key", "PUT", "/v1/documents/big", big)
    assert (status, body["error"]["code"]) == (413, "quota_exceeded")
    told = send(house, "a-key", "GET", "/v1/library")[1]
    assert 0 <= told["used_bytes"] <= told["quota_bytes"] == 200_000


@pytest.mark.enable_socket
def test_a_tenant_that_asks_too_often_is_told_when_to_come_again(house: Live) -> None:
    statuses = [send(house, "s-key", "GET", "/v1/models")[0] for _ in range(3)]
    assert statuses == [200, 429, 429]
    status, body, headers = house.send("GET", "/v1/models", authorization="Bearer s-key")
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert send(house, "a-key", "GET", "/v1/models")[0] == 200


@pytest.mark.enable_socket
def test_metrics_are_the_operators(house: Live) -> None:
    assert send(house, "a-key", "GET", "/metrics")[0] == 403
    assert send(house, "o-key", "GET", "/metrics")[0] == 200
    for key in ("a-key ", "A-key", "a-key" * 1000, "", "nobody"):
        assert send(house, key, "GET", "/v1/models")[0] == (200 if key == "a-key " else 401)


def test_pace_lets_some_pass_at_once_and_then_one_after_another() -> None:
    now = 0.0
    pace = Pace(clock=lambda: now)
    slow = Tenant("slow", b"s" * 16, requests_per_minute=60.0)
    assert [pace.wait_s(slow) for _ in range(10)] == [0] * 10
    assert pace.wait_s(slow) == pytest.approx(1)
    now = 2.5
    assert [pace.wait_s(slow) for _ in range(3)] == pytest.approx([0, 0, 0.5])
    assert pace.wait_s(OPERATOR) == 0


def test_scopes_come_from_a_secret_and_are_never_the_shared_one() -> None:
    assert scope_of(b"x", "acme") == scope_of(b"x", "acme")
    assert len({scope_of(b"x", "acme"), scope_of(b"y", "acme"), scope_of(b"x", "bolt"), SHARED}) == 4


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"tenant": "a"}], "needs tenant and sha256"),
        ([{**ROWS[0], "scope": "x"}], "needs tenant and sha256"),
        ([{"tenant": "a", "sha256": "my-key"}], "64 hex digits"),
        ([{"tenant": " ", "sha256": "0" * 64}], "named by"),
        ([{**ROWS[0], "quota_mb": 0}], "quota_mb"),
        ([{**ROWS[0], "shared": "yes"}], "shared"),
        ([ROWS[0], ROWS[0]], "same key"),
        ([ROWS[0], {**ROWS[1], "tenant": "acme"}], "other limits"),
        ("acme", "needs tenant"),
    ],
)
def test_grants_that_are_none_are_refused(rows: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        granted(rows, secret=b"secret")


def test_tenants_need_a_secret_and_keys_stand_nowhere_in_clear() -> None:
    with pytest.raises(InputError, match="KVLINK_SECRET"):
        granted(ROWS, secret=None)
    keys = Keys(["o-key"], granted(ROWS, secret=b"secret"))
    assert "-key" not in repr(vars(keys))
