"""What an operator sees: scored answers, traces, metrics by tier, dashboards whose every metric exists, faults."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import MODEL, Live, live, tiny_engine, until

from kvlink import DeviceBusy
from kvlink.engine.library import Library
from kvlink.engine.scoring import scoring
from kvlink.server.listening import JsonLines
from kvlink.server.served import Served
from kvlink.server.shadow import Shadow
from kvlink.server.traces import Traces

CHAT = "/v1/chat/completions"
DOCUMENTS = [{"text": "The office opens at seven."}, {"text": "Bread is baked on Tuesdays."}]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "When does it open?"}],
    "temperature": 0,
    "max_tokens": 6,
    "documents": DOCUMENTS,
}
GRAFANA = Path(__file__).parents[2] / "docs" / "assets" / "grafana.json"


@pytest.fixture
def own() -> Iterator[Served]:
    with tiny_engine() as engine:
        yield Served(engine=engine, model=MODEL)


def metrics(server: Live) -> dict[str, float]:
    text = server.send("GET", "/metrics")[1]
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def test_an_answer_is_scored_against_full_attention() -> None:
    """Exact where there is nothing to reuse; with documents that see nothing of each other it is not."""

    def scored(documents: list[str]) -> Any:
        with tiny_engine() as engine:
            job = engine.job(documents, "When does it open?", max_new_tokens=6)
            engine.submit(job)
            while engine.step():
                pass
            steps = scoring(job)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    assert engine.stats().running == 0
                    assert engine.sessions is not None
                    assert engine.sessions.residency.stats().leased_bytes == 0
                    return end.value

    exact = scored([])
    assert (exact.agreement, exact.tokens) == (1.0, 6)
    assert exact.kl < 1e-9
    assert scored([one["text"] for one in DOCUMENTS]).kl > 1e-6


def test_documents_that_are_gone_are_not_encoded_again_to_score_an_answer() -> None:
    """It would wait for what the very steps encode between which it runs."""
    with tiny_engine() as engine:
        job = engine.job([one["text"] for one in DOCUMENTS], "When does it open?", max_new_tokens=6)
        engine.submit(job)
        while engine.step():
            pass
        assert engine.sessions is not None
        names = engine.store.names()
        for name in names:
            engine.store.delete(name)
        engine.sessions.forget(*names)
        with pytest.raises(DeviceBusy, match="not on the device any more"):
            next(scoring(job))
        assert engine.store.names() == set()
        assert engine.sessions.residency.stats().leased_bytes == 0


@pytest.mark.enable_socket
def test_reuse_that_agrees_too_little_is_switched_off_and_every_response_says_so(own: Served) -> None:
    own.shadow = Shadow(rate=1.0, least_agreement=1.1, least_scored=2)  # no reuse can be that good
    with live(own) as server:
        first = server.send("POST", CHAT, ASKED)[1]["usage"]["kvlink"]
        assert first["mode"] == "documents"
        assert "note" not in first
        server.send("POST", CHAT, {**ASKED, "stream": True})
        until(lambda: bool(own.exact))
        after = server.send("POST", CHAT, ASKED)[1]["usage"]["kvlink"]
        assert after["mode"] == "exact"
        assert "1.1 is wanted" in after["note"]
        assert {row["source"] for row in after["documents"]} == {"computed"}
        found = metrics(server)
        assert found["kvlink_shadow_agreement_count"] == 2
        assert found["kvlink_shadow_kl_sum"] > 0
        assert found["kvlink_exact"] == 1


@pytest.mark.enable_socket
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_reuse_stays_on_as_long_as_nothing_is_wanted_of_it(own: Served, rate: float) -> None:
    own.shadow = Shadow(rate=rate, least_agreement=0.0, least_scored=1)
    with live(own) as server:
        server.send("POST", CHAT, ASKED)
        server.send("POST", CHAT, {**ASKED, "documents": []})  # there is nothing to score in it
        if rate:
            until(lambda: metrics(server)["kvlink_shadow_agreement_count"] == 1)
        assert server.send("POST", CHAT, ASKED)[1]["usage"]["kvlink"]["mode"] == "documents"
        assert metrics(server)["kvlink_exact"] == 0


@pytest.mark.enable_socket
def test_a_trace_tells_what_an_answer_was_made_of_and_no_text(own: Served) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    own.traces = Traces(provider)
    parent = "0af7651916cd43dd8448eb211c80319c"
    with live(own) as server:
        headers = {"traceparent": f"00-{parent}-b7ad6b7169203331-01", "x_request_id": "mine"}
        usage = server.send("POST", CHAT, ASKED, **headers)[1]["usage"]
        spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans[f"chat {MODEL}"]
    assert f"{root.context.trace_id:032x}" == parent
    assert root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert root.attributes["kvlink.request_id"] == "mine"
    assert {"encode", "wait and prefill", "decode"} <= spans.keys()
    for name, span in spans.items():
        if span is not root:
            assert span.parent.span_id == root.context.span_id, name
            assert root.start_time <= span.start_time <= span.end_time
    assert "office" not in "".join(span.to_json() for span in spans.values())


@pytest.mark.enable_socket
def test_metrics_tell_tokens_bytes_and_tiers(tmp_path: Path) -> None:
    with tiny_engine(tmp_path / "entries") as engine, Library(tmp_path, engine) as library:
        served = Served(engine=engine, library=library, model=MODEL)
        with live(served) as server:
            server.send("PUT", "/v1/documents/a", {"text": DOCUMENTS[0]["text"]})
            until(lambda: metrics(server).get('kvlink_rebuilds_total{when="background"}') == 1)
            for _ in range(2):
                usage = server.send("POST", CHAT, {**ASKED, "documents": ["a"]})[1]["usage"]
            found = metrics(server)
        (row,) = usage["kvlink"]["documents"]
        tokens = found['kvlink_document_tokens_total{source="device"}']
        assert tokens == row["tokens"]
        assert found['kvlink_document_bytes_total{source="device"}'] == tokens * engine.runner.geometry.bytes_per_token(
            engine.runner.dtype
        )
        assert found['kvlink_document_tokens_total{source="disk"}'] == row["tokens"]
        assert found['kvlink_tier_used_bytes{tier="disk"}'] > 0
        assert found['kvlink_tier_hits_total{tier="device"}'] == 1
        assert found['kvlink_breaker_open{tier="disk"}'] == 0


@pytest.mark.enable_socket
def test_every_metric_of_the_dashboards_exists_and_every_metric_is_on_grafanas(server: Live) -> None:
    server.send("POST", CHAT, ASKED)
    text = server.send("GET", "/metrics")[1]
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    ends = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    names = {name + end for name, kind in kinds.items() for end in ends[kind] if not name.endswith("_created")}
    board = json.loads(GRAFANA.read_text("utf-8"))
    told = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    shown = set(re.findall(r"kvlink_\w+", told))
    assert shown <= names
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert {name for name in kinds if not name.endswith("_created")} <= bases
    status, page, headers = server.send("GET", "/dashboard")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    on_page = set(re.findall(r'"(kvlink_\w+)"', page))
    assert on_page
    assert on_page <= names | {name for name, kind in kinds.items() if kind == "histogram"}
    assert "http" not in page, "it loads nothing from elsewhere"


def test_every_line_of_the_log_is_json() -> None:
    def line(message: str) -> Any:
        return json.loads(JsonLines().format(logging.makeLogRecord({"msg": message, "levelname": "INFO"})))

    assert line('{"id": "x", "status": 200}')["status"] == 200
    words = line("plain\nwords")
    assert (words["message"], words["level"], sorted(words)) == ("plain\nwords", "info", ["level", "message", "time"])
    assert line("7")["message"] == "7"
    try:
        raise RuntimeError("a secret of the client")
    except RuntimeError:
        told = logging.makeLogRecord({"msg": "it broke\n", "exc_info": sys.exc_info()})
    row = json.loads(JsonLines().format(told))
    assert (row["message"], row["fault"]) == ("it broke", "RuntimeError")
    assert row["at"][-1].startswith("test_observing.py:")
    assert "secret" not in json.dumps(row)


@pytest.mark.enable_socket
def test_a_fault_is_told_by_its_place_and_without_what_was_asked(
    own: Served,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a secret of the client")

    monkeypatch.setattr(own.engine, "job", broken)
    with caplog.at_level(logging.INFO, "kvlink.server"), live(own) as server:
        status, body, headers = server.send("POST", CHAT, ASKED, x_request_id="mine")
        found = metrics(server)
    assert (status, body["error"]["code"], headers["x-request-id"]) == (500, "failed", "mine")
    assert found[f'kvlink_http_requests_total{{route="{CHAT}",status="500"}}'] == 1
    rows = [json.loads(one.getMessage()) for one in caplog.records if one.name == "kvlink.server"]
    fault, line = [row for row in rows if row["id"] == "mine"]
    assert (fault["fault"], line["status"]) == ("RuntimeError", 500)
    assert any(place.startswith("generation.py:") for place in fault["at"])
    assert "secret" not in json.dumps([rows, body]) + "".join(capfd.readouterr())


@pytest.mark.enable_socket
def test_the_log_tells_tokens_and_who_asked(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    def rows() -> list[Any]:
        told = [json.loads(one.getMessage()) for one in caplog.records if one.name == "kvlink.server"]
        return [row for row in told if row["id"] == "told"]

    with caplog.at_level(logging.INFO, "kvlink.server"):
        usage = server.send("POST", CHAT, {**ASKED, "n": 2}, x_request_id="told")[1]["usage"]
        until(lambda: bool(rows()))
    (row,) = rows()
    assert row["tenant"] == "operator"
    assert row["completion_tokens"] == usage["completion_tokens"]
    assert row["prompt_tokens"] == usage["prompt_tokens"]
    assert row["documents"] == 2
