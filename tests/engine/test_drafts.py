"""Absent documents are encoded among the rows of answers: at their pace, once, and for nobody who has gone."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import QUESTION, engine_of, loaded, name_of
from scheduled import NEW, engine_with, ids_of, run, scheduler_of, submit

from kvlink.core.errors import Cancelled, ModelError
from kvlink.engine import drafts as drafts_module
from kvlink.engine import session as session_module
from kvlink.engine.engine import Engine
from kvlink.engine.library import Library
from kvlink.engine.loader import Loader
from kvlink.engine.rebuild import Rebuilder
from kvlink.models.draft import Draft
from kvlink.models.runner import Runner
from kvlink.store import MemoryStore, Store
from kvlink.store.redis import RedisStore
from store.servers import RedisServer
from tiny_models import largest

LONG = "The road over the pass is closed from November to May. " * 4
OTHER = "A bus leaves the valley at six, and another one at nine. " * 2


@pytest.fixture(scope="module")
def model() -> Iterator[Engine]:
    with loaded(links=None) as engine:
        yield engine


def fresh(model: Engine, store: Store | None = None, **limits: Any) -> Engine:
    """Return an engine whose store and device are empty."""
    loader = Loader(
        runner=model.runner,
        store=store or MemoryStore(budget_bytes=1 << 26),
        identity=model.loader.identity,
        sink=model.loader.sink,
        wait_s=60.0,
    )
    return engine_with(model.over(loader), **limits)


def leased(engine: Engine) -> int:
    assert engine.sessions is not None
    return engine.sessions.residency.stats().leased_bytes


def is_there(engine: Engine, text: str) -> bool:
    assert engine.sessions is not None
    return name_of(engine, text) in engine.sessions.residency


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], int]:
    """How many rows of each segment were computed."""
    found: dict[tuple[int, ...], int] = {}
    sound = Draft.rows

    def counting(draft: Draft, number: int) -> Any:
        found[draft.token_ids] = found.get(draft.token_ids, 0) + number
        return sound(draft, number)

    monkeypatch.setattr(Draft, "rows", counting)
    return found


@pytest.mark.parametrize("rows_of_a_step", [{}, {"prefill_rows": 9, "step_rows": 9}])
def test_answers_and_entries_are_those_of_documents_encoded_before(
    model: Engine, rows_of_a_step: dict[str, int]
) -> None:
    engine, before = fresh(model, **rows_of_a_step), fresh(model)
    before.encode([LONG, OTHER])
    requests = [([LONG, OTHER], QUESTION), ([OTHER], "Which bus?")]
    found, wanted = submit(engine, *requests), submit(before, *requests)
    run(engine, *found)
    run(before, *wanted)
    assert [ids_of(job) for job in found] == [ids_of(job) for job in wanted]
    assert found[0].answer is not None
    assert [row.source for row in found[0].answer.usage.documents] == ["encoded"] * 2
    for text in (LONG, OTHER):
        entries = []
        for one in (engine, before):
            lease = one.store.get(name_of(one, text), ("raw",))
            assert lease is not None
            with lease:
                entries.append(lease.object.decode())
        assert entries[0].token_ids == entries[1].token_ids
        assert largest(entries[0].keys - entries[1].keys) <= 1e-5  # tables of the model are float32
        assert largest(entries[0].values - entries[1].values) <= 1e-5


def test_running_answers_get_a_token_in_each_step_while_documents_are_encoded(model: Engine) -> None:
    engine = fresh(model, prefill_rows=8)
    scheduler = scheduler_of(engine)
    first = submit(engine, ([], "Who?"), max_new_tokens=80)[0]
    while not first.ids:
        scheduler.step()
    waiting = submit(engine, ([LONG], QUESTION))[0]
    steps = 0
    while waiting.session is None:
        before, rows = len(first.ids), scheduler.stats().rows
        scheduler.step()
        assert len(first.ids) == before + 1
        assert scheduler.stats().rows - rows <= 1 + 8
        assert scheduler.stats().encoding <= 1
        steps += 1
    assert steps > 10
    run(engine, first, waiting)


def test_prompts_and_documents_get_half_of_the_rows_each(model: Engine) -> None:
    """The older request's document does not hold up the younger one's prompt, nor the reverse."""
    engine = fresh(model, step_rows=1)
    scheduler = scheduler_of(engine)
    encoding, plain = submit(engine, ([LONG], QUESTION), ([], "What is there to see on the way?"))
    scheduler.step()
    assert plain.session is not None
    prompt, document = len(plain.session.left), scheduler.stats().rows
    for _ in range(20):
        scheduler.step()
    assert len(plain.session.left) == prompt - 10
    assert scheduler.stats().rows - document == 20
    scheduler.limits = type(scheduler.limits)()
    run(engine, encoding, plain)


def test_two_requests_for_one_absent_document_encode_it_once(model: Engine, rows: dict[tuple[int, ...], int]) -> None:
    engine = fresh(model, step_rows=16)
    jobs = submit(engine, ([LONG], QUESTION), ([LONG], "When?"))
    run(engine, *jobs)
    assert sum(rows.values()) == len(next(iter(rows)))
    reasons = [job.answer.usage.documents[0].reason for job in jobs if job.answer]
    assert reasons == ["not in the store", "encoded by another request"]


def test_who_is_cancelled_alone_stops_the_encode_and_leaves_nothing(
    model: Engine, rows: dict[tuple[int, ...], int]
) -> None:
    engine = fresh(model, step_rows=16)
    job = submit(engine, ([LONG], QUESTION))[0]
    scheduler_of(engine).step()
    assert rows
    assert leased(engine) > 0
    job.cancel()
    done = sum(rows.values())
    assert not scheduler_of(engine).step()
    assert isinstance(job.error, Cancelled)
    assert (sum(rows.values()), leased(engine), scheduler_of(engine).stats().encoding) == (done, 0, 0)
    assert not is_there(engine, LONG)
    assert not engine.loader.has(next(iter(rows)))
    assert engine.sessions is not None
    assert not engine.sessions._openings


def test_a_deadline_that_passes_meanwhile_is_told(model: Engine) -> None:
    engine = fresh(model, step_rows=16)
    job = submit(engine, ([LONG], QUESTION), deadline_s=60.0)[0]
    scheduler_of(engine).step()
    job.deadline = job.start
    scheduler_of(engine).step()
    assert "its documents were being encoded" in str(job.error)


def test_who_is_cancelled_beside_another_one_stops_nothing(model: Engine, rows: dict[tuple[int, ...], int]) -> None:
    engine = fresh(model, step_rows=16)
    gone, other = submit(engine, ([LONG], QUESTION), ([LONG], "When?"))
    scheduler_of(engine).step()
    gone.cancel()
    run(engine, gone, other)
    assert sum(rows.values()) == len(next(iter(rows)))
    assert other.answer is not None


def test_an_encode_that_fails_fails_its_requests_alone(model: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sound = fresh(model), session_module.forward
    bad = name_of(engine, LONG)

    def failing(runner: Runner, runs: Sequence[Any], *rest: Any, **options: Any) -> torch.Tensor:
        logits = sound(runner, runs, *rest, **options)
        if any(run.unrotated is not None and len(run.positions) > 150 for run in runs):
            raise RuntimeError("the device has had enough")
        return logits

    monkeypatch.setattr(session_module, "forward", failing)
    jobs = submit(engine, ([LONG], QUESTION), ([OTHER], "Which?"), ([OTHER, LONG], "When?"), ([], "Who?"))
    run(engine, *jobs)
    assert [job.error is None for job in jobs] == [False, True, False, True]
    assert isinstance(jobs[0].error, ModelError)
    assert "had enough" in str(jobs[2].error)
    assert (leased(engine), engine.store.stat(bad)) == (0, {})
    monkeypatch.undo()
    run(engine, again := submit(engine, ([LONG], QUESTION))[0])
    assert again.answer is not None


def test_an_entry_that_cannot_be_written_is_told_and_answers(model: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh(model, MemoryStore(budget_bytes=0))
    run(engine, job := submit(engine, ([LONG], QUESTION))[0])
    assert job.answer is not None
    assert job.answer.usage.documents[0].reason.startswith("not kept: ")
    monkeypatch.setattr(Loader, "drafted", lambda *_: 1 / 0)
    run(engine, broken := submit(engine, ([OTHER], QUESTION))[0])
    assert "ZeroDivisionError" in str(broken.error)
    assert leased(engine) == 0


def test_a_younger_request_whose_documents_are_there_does_not_wait_for_an_encode(model: Engine) -> None:
    engine = fresh(model, step_rows=4)
    run(engine, *submit(engine, ([OTHER], "Warm.")))
    slow, quick = submit(engine, ([LONG * 3], QUESTION), ([OTHER], "Which?"), max_new_tokens=2)
    run(engine, quick)
    assert slow.session is None
    run(engine, slow)


def test_a_request_that_waits_for_an_encode_gives_way_to_an_older_one(model: Engine) -> None:
    engine = fresh(model, step_rows=16, patience=1)
    scheduler = scheduler_of(engine)
    young = submit(engine, ([LONG], QUESTION))[0]
    scheduler.step()
    old = submit(engine, ([], "Old?"))[0]
    young.number, old.number = old.number, young.number
    scheduler._take_in()
    scheduler._wait_for_memory()
    assert young.opening is None
    assert leased(engine) == 0
    run(engine, young, old)
    assert young.answer is not None


def test_a_document_that_is_removed_while_it_is_encoded_is_kept_nowhere(model: Engine, tmp_path: Path) -> None:
    base = engine_with(engine_of(store=tmp_path / "store").over(engine_of(store=tmp_path / "store").loader))
    with Library(tmp_path / "library", base) as library:
        library.put("road", LONG)
        engine = library.engine
        job = engine.job(library.documents(["road"]), QUESTION, max_new_tokens=NEW)
        scheduler = scheduler_of(engine)
        scheduler.limits = type(scheduler.limits)(step_rows=16)
        engine.submit(job)
        engine.step()
        assert job.opening is not None
        assert not library.remove("road")
        run(engine, job)
        assert job.answer is not None
        assert engine.sessions is not None
        library.work()
        assert engine.sessions.beginnings.stats().nodes == 0
        assert not is_there(engine, LONG)
        assert not engine.store.names()


def test_a_changed_document_keeps_its_beginning_and_only_the_rest_is_computed(
    model: Engine, tmp_path: Path, rows: dict[tuple[int, ...], int]
) -> None:
    base = engine_with(engine_of(store=tmp_path / "store").over(engine_of(store=tmp_path / "store").loader))
    with Library(tmp_path / "library", base) as library:
        library.put("road", LONG)
        library.work()
        library.put("road", LONG + "It is open now.")
        assert isinstance(library.engine.loader, Rebuilder)
        answer = library.generate(QUESTION, ["road"], max_new_tokens=NEW)
        ((ids, computed),) = rows.items()
        assert 0 < computed < len(ids) // 4
        assert answer.usage.documents[0].reason == f"rebuilding: {len(ids) - computed} of {len(ids)} tokens kept"
        wanted = fresh(model).generate([LONG + "It is open now."], QUESTION, max_new_tokens=NEW)
        assert wanted.usage.documents[0].tokens == answer.usage.documents[0].tokens


def test_what_another_machine_encodes_holds_up_nobody_else(
    model: Engine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(drafts_module, "LOOK_S", 0.0)
    with RedisServer() as server:
        here, there = (RedisStore(server.url, prefix=request.node.name, sleep=lambda _: None) for _ in "ab")
        engine = fresh(model, here)
        claim = there.claim(name_of(engine, LONG), ttl_s=600.0)
        assert claim is not None
        waiting, other = submit(engine, ([LONG], QUESTION), ([OTHER], "Which?"))
        run(engine, other)
        assert other.answer is not None
        assert waiting.session is None
        for _ in range(3):  # nothing else to do
            assert scheduler_of(engine).step()
        list(fresh(model, there).loader.encode(waiting.request.prompt.segments))
        claim.release()
        run(engine, waiting)
        assert waiting.answer is not None
        assert waiting.answer.usage.documents[0].source == "remote"
        assert waiting.answer.usage.documents[0].reason == ""


def test_what_another_machine_put_and_let_go_between_look_and_claim_is_read(
    model: Engine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with RedisServer() as server:
        here, there = (RedisStore(server.url, prefix=request.node.name) for _ in "ab")
        engine, other = fresh(model, here), fresh(model, there)
        claim = here.claim

        def late(name: str, **options: Any) -> Any:
            other.encode([LONG])
            return claim(name, **options)

        monkeypatch.setattr(here, "claim", late)
        (job,) = submit(engine, ([LONG], QUESTION))
        run(engine, job)
        assert job.answer is not None
        assert job.answer.usage.documents[0].source == "remote"
        assert there.claim(name_of(engine, LONG), ttl_s=1.0) is not None


@pytest.mark.parametrize("released", [True, False], ids=["given up", "dead"])
def test_what_another_machine_does_not_finish_is_encoded_here(
    model: Engine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, released: bool
) -> None:
    monkeypatch.setattr(drafts_module, "LOOK_S", 0.0)
    with RedisServer() as server:
        here, there = (RedisStore(server.url, prefix=request.node.name, sleep=lambda _: None) for _ in "ab")
        engine = fresh(model, here)
        claim = there.claim(name_of(engine, LONG), ttl_s=600.0)
        assert claim is not None
        job = submit(engine, ([LONG], QUESTION))[0]
        scheduler_of(engine).step()
        assert job.session is None
        if released:
            claim.release()
        else:
            engine.loader.wait_s = 0.0
        run(engine, job)
        assert job.answer is not None
        reason = job.answer.usage.documents[0].reason
        assert reason == "not in the store" if released else "that had claimed it" in reason
