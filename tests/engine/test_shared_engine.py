"""A shared engine: documents read where they lie, known beginnings, both gone when a document is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import QUESTION, TEXTS, last_logits, loaded

from kvlink.core.errors import DeviceOverflow, KVLinkWarning, ModelRefused
from kvlink.engine.build import sessions_of
from kvlink.engine.engine import Engine
from kvlink.engine.library import Library
from kvlink.models.links import LinkTokens
from kvlink.models.turning import Turns
from kvlink.store.disk import DiskStore
from tiny_models import largest

NEW = 12


@pytest.fixture
def engine() -> Iterator[Engine]:
    with loaded(links=None) as made:
        yield made


def over(engine: Engine, **options: object) -> Engine:
    """Return an engine with the same parts, but a device tier and a tree of its own, and random link tokens."""
    links = LinkTokens.random(engine.runner.embedding, num_links=3)
    sessions = sessions_of(engine.loader, links=links, bundle="random", **options)  # type: ignore[arg-type]
    return Engine(
        runner=engine.runner,
        prompter=engine.prompter,
        loader=engine.loader,
        report=engine.report,
        links=links,
        sessions=sessions,
    )


def test_answers_are_those_of_an_assembling_engine(engine: Engine) -> None:
    assembling = Engine(runner=engine.runner, prompter=engine.prompter, loader=engine.loader, report=engine.report)
    assert engine.sessions is not None
    assert assembling.sessions is None
    for docs in (TEXTS, TEXTS[::-1], TEXTS[1:], []):
        for labels in (False, True):
            wanted = assembling.generate(docs, QUESTION, labels=labels, max_new_tokens=NEW)
            for _ in range(2):
                assert engine.generate(docs, QUESTION, labels=labels, max_new_tokens=NEW).ids == wanted.ids


def test_only_what_is_not_known_is_computed(engine: Engine) -> None:
    shared = over(engine)
    first, again, more, other = (
        shared.generate(docs, question, max_new_tokens=1).usage
        for docs, question in [(TEXTS, QUESTION), (TEXTS, QUESTION), (TEXTS, "When?"), ((*TEXTS[:2], "New."), QUESTION)]
    )
    assert [row.source for row in first.documents] == ["encoded"] * 3
    assert [row.source for row in again.documents] == ["device"] * 3
    assert first.computed_tokens == first.prompt_tokens + 9
    assert again.computed_tokens == 1
    assert 1 < more.computed_tokens == more.prompt_tokens - more.cached_tokens
    assert more.known_links == 9
    assert other.known_links == 6


def test_documents_in_another_order_find_the_device_and_no_beginning(engine: Engine) -> None:
    shared = over(engine)
    shared.generate(TEXTS, QUESTION, max_new_tokens=1)
    usage = shared.generate(TEXTS[::-1], QUESTION, max_new_tokens=1).usage
    assert [row.source for row in usage.documents] == ["device"] * 3
    assert usage.known_links == 0


def test_documents_may_follow_the_longest_known_beginning(engine: Engine) -> None:
    shared = over(engine)
    wanted = shared.generate(TEXTS, QUESTION, max_new_tokens=NEW)
    again = shared.generate(TEXTS[::-1], QUESTION, max_new_tokens=NEW, order="reuse")
    assert again.ids == wanted.ids
    assert again.usage.computed_tokens == 1
    assert [row.name for row in again.usage.documents] == ["document 1", "document 2", "document 3"]
    assert [row.tokens for row in again.usage.documents] == [row.tokens for row in wanted.usage.documents][::-1]


def test_labels_stay_with_their_places_when_documents_are_reordered(engine: Engine) -> None:
    shared = over(engine)
    wanted = shared.generate(TEXTS, QUESTION, labels=True, max_new_tokens=NEW)
    again = shared.generate(TEXTS[::-1], QUESTION, labels=True, max_new_tokens=NEW, order="reuse")
    assert again.ids == wanted.ids
    assert again.usage.computed_tokens == 1


def test_a_known_beginning_changes_logits_by_rounding_alone(engine: Engine) -> None:
    """Against a fresh computation of the same ids, an answer and what follows included."""
    shared, fresh = over(engine), over(engine)
    for docs, question in [(TEXTS, "Why?"), (TEXTS[:2], QUESTION), (TEXTS, QUESTION)]:
        fresh.forget_beginnings()
        rows = [last_logits(one, docs, question) for one in (shared, fresh)]
        assert largest(rows[0] - rows[1]) <= 1e-4


def test_other_system_prompts_bundles_and_scopes_share_no_beginning(engine: Engine) -> None:
    shared = over(engine)
    shared.generate(TEXTS, QUESTION, max_new_tokens=1)
    assert shared.generate(TEXTS, QUESTION, system="Be brief.", max_new_tokens=1).usage.known_links == 0
    assert shared.sessions is not None
    other = shared.sessions.over(shared.sessions.residency, root=("model", "", "other scope"))
    request = shared.job(TEXTS, QUESTION, max_new_tokens=1).request
    session = other.begin(request, room=1)
    assert session.known_rows == 0
    other.end(session)
    other._bundle = "another"
    session = other.begin(request, room=1)
    assert session.known_links == 0
    other.end(session)


def test_documents_beyond_the_device_are_refused_with_both_figures(engine: Engine) -> None:
    shared = over(engine, device_budget_bytes=100_000)
    with pytest.raises(DeviceOverflow, match=r"\d") as refusal:
        shared.generate(TEXTS, QUESTION)
    assert str(87_500) in str(refusal.value).replace(",", "")
    assert shared.generate([TEXTS[0]], QUESTION, max_new_tokens=1).ids


def test_an_abandoned_stream_lets_go_of_its_documents(engine: Engine) -> None:
    assert engine.sessions is not None
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=NEW)
    next(stream)
    assert engine.sessions.residency.stats().leased_bytes > 0
    stream.close()
    assert engine.sessions.residency.stats().leased_bytes == 0


def test_a_removed_document_is_nowhere_and_comes_back_by_no_beginning(engine: Engine, tmp_path: Path) -> None:
    with (
        loaded(store=DiskStore(tmp_path / "store"), links=None) as base,
        Library(tmp_path / "library", base) as library,
    ):
        library.put("pass", TEXTS[1])
        library.put("office", TEXTS[0])
        sessions = library.engine.sessions
        assert sessions is not None
        stream = library.stream(QUESTION, ["office", "pass"], max_new_tokens=NEW)
        next(stream)
        assert not library.remove("pass")  # the stream still reads it
        nodes = sessions.beginnings.stats().nodes
        stream.close()
        assert sessions.beginnings.stats().nodes == nodes  # nothing of it was kept behind the removal
        assert library.work() == []
        assert sessions.residency.stats().num_residents == 1
        assert sessions.residency.stats().leased_bytes == 0


def test_what_cannot_be_shared_exactly_is_refused_where_sharing_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "turn", lambda self, query, quarter, layer, rows, starts: query[:, rows])
    with pytest.warns(KVLinkWarning, match="copied into each prompt"):
        engine = loaded(links=None)
    assert engine.report.attention == "assembled"
    assert engine.sessions is None
    with pytest.warns(KVLinkWarning), pytest.raises(ModelRefused, match="where they lie"):
        loaded(links=None, attention="shared")


def test_an_engine_that_is_asked_to_assembles() -> None:
    with loaded(links=None, attention="assembled") as engine:
        assert engine.report.attention == "shared"
        assert engine.sessions is None
        assert engine.generate(TEXTS, QUESTION, max_new_tokens=1).usage.documents[0].source == "encoded"
        assert isinstance(engine.runner.dtype, torch.dtype)
