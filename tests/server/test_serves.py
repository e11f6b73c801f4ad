"""What a server says of what it serves: equal ones the same, others something else; what is not theirs they refuse."""

from typing import Any

import pytest
import torch
from live import MODEL, TOKENIZER, Live, tiny_engine

from kvlink import Engine
from kvlink.server.served import Served
from kvlink.server.serves import HEADER, Serves
from tiny_bundles import tiny_bundle
from tiny_models import tiny_model

pytestmark = pytest.mark.enable_socket


def serves_with(name: str = MODEL, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Serves:
    model = tiny_model("llama", dtype=dtype, vocab_size=len(TOKENIZER), seed=seed)
    with Engine.from_pretrained(model, tokenizer=TOKENIZER, **options) as engine:
        return Served(engine=engine, model=name).serves


def test_equal_servers_say_the_same_and_each_difference_is_named(server: Live) -> None:
    first = serves_with()
    assert first == serves_with()
    assert first == server.served.serves
    with tiny_engine() as engine:
        bundle = tiny_bundle(engine.runner, digest=engine.loader.identity.model)
    others = {
        "weights": serves_with(seed=1),
        "name": serves_with("other"),
        "sink prefix or dtype": serves_with(sink="none"),
        "link bundle": serves_with(links=bundle, sink="none"),
    }
    assert len({first.digest, *(one.digest for one in others.values())}) == 5
    for what, other in others.items():
        assert f"another {what}" in other.other_than(first)
    assert first.other_than(first) == ""


def test_ready_tells_it_and_what_is_meant_for_another_is_refused(server: Live) -> None:
    told = server.send("GET", "/ready")[1]
    assert Serves.read(told) == server.served.serves
    digest = server.served.serves.digest
    assert server.send("GET", "/v1/models", **{HEADER: digest})[0] == 200
    status, body, _ = server.send("GET", "/v1/models", **{HEADER: "0" * 32})
    assert (status, body["error"]["code"]) == (421, "other_model")


@pytest.mark.parametrize("told", [None, [], {}, {"serves": None}, {"serves": {"model": "x"}}, {"serves": "x"}])
def test_what_tells_nothing_of_the_kind_is_nothing(told: Any) -> None:
    assert Serves.read(told) is None
