"""Many requests in one forward: each gets what it would get alone; one that fails does so alone; nothing starves."""

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pytest
import torch
from engines import QUESTION, TEXTS, loaded
from scheduled import MORE, NEW, REQUESTS, engine_with, ids_of, run, same_up_to_a_tie, scheduler_of, submit

from kvlink.core.errors import Cancelled, DeadlineExceeded, InputError, ModelError, QueueFull, StoreError
from kvlink.engine import session as session_module
from kvlink.engine.engine import Engine
from kvlink.engine.limits import Limits
from kvlink.engine.request import Request
from kvlink.engine.sampling import SamplingParams
from kvlink.engine.session import Session
from kvlink.engine.task import Task


@pytest.fixture(scope="module")
def base() -> Iterator[Engine]:
    with loaded(links=None) as engine:
        yield engine


# --- alone and together ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{}, {"step_rows": 7, "prefill_rows": 3}, {"max_running": 2}])
@pytest.mark.parametrize("num_links", [0, 3])
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(
    base: Engine, limits: dict[str, int], num_links: int
) -> None:
    alone = engine_with(base, num_links=num_links)
    wanted = []
    for request in REQUESTS:
        alone.forget_beginnings()
        wanted += submit(alone, request)
        run(alone, wanted[-1])
    together = engine_with(base, num_links=num_links, **limits)
    found = submit(together, *REQUESTS)
    run(together, *found)
    for one, other in zip(found, wanted, strict=True):
        assert same_up_to_a_tie(alone, one, other)
    assert scheduler_of(together).stats().finished == len(REQUESTS)


def test_a_prompt_that_says_nothing_new_of_the_batch_differs_when_a_row_is_another_s(base: Engine) -> None:
    """Negative control: rows of requests that are mixed up give other tokens."""
    engine = engine_with(base)
    assert engine.sessions is not None
    jobs = submit(engine, REQUESTS[0], REQUESTS[3])
    sound = engine.sessions.advance

    def mixed(work: list, drafts: list) -> None:  # type: ignore[type-arg]
        sound(work, drafts)
        ready = [session for session, _ in work if session.logits is not None]
        if len(ready) == 2:
            ready[0].logits, ready[1].logits = ready[1].logits, ready[0].logits

    engine.sessions.advance = mixed  # type: ignore[method-assign]
    run(engine, *jobs)
    alone = engine_with(base)
    wanted = submit(alone, REQUESTS[0], REQUESTS[3])
    run(alone, *wanted)
    assert [ids_of(job) for job in jobs] != [ids_of(job) for job in wanted]


def test_sampled_tokens_follow_the_seed_in_any_batch(base: Engine) -> None:
    sampling = SamplingParams(temperature=1.5, seed=7, top_p=0.9)
    alone, together = engine_with(base), engine_with(base)
    wanted = submit(alone, REQUESTS[0], sampling=sampling)
    run(alone, *wanted)
    found = submit(together, REQUESTS[0], sampling=sampling)
    others = submit(together, *REQUESTS[1:])
    run(together, *found, *others)
    assert ids_of(found[0]) == ids_of(wanted[0])


def test_threads_that_stream_get_their_own_answers(base: Engine) -> None:
    from concurrent.futures import ThreadPoolExecutor

    engine = engine_with(base)
    wanted = [engine.generate(docs, question, max_new_tokens=NEW).text for docs, question in REQUESTS]
    for started in (False, True):
        if started:
            engine.start()
        with ThreadPoolExecutor(6) as pool:
            found = list(
                pool.map(lambda r: "".join(engine.stream(r[0], r[1], max_new_tokens=NEW)), REQUESTS)  # type: ignore[arg-type]
            )
        assert found == wanted
    engine.stop()


# --- pace and order -------------------------------------------------------------------------------------------------


def test_running_answers_get_a_token_in_each_step_while_others_prefill(base: Engine) -> None:
    engine = engine_with(base, prefill_rows=4)
    first = submit(engine, REQUESTS[0], max_new_tokens=60)[0]
    scheduler = scheduler_of(engine)
    while not first.ids:
        scheduler.step()
    submit(engine, *REQUESTS[1:])
    for _ in range(20):
        before, rows = len(first.ids), scheduler.stats().rows
        if first.has_ended:
            break
        scheduler.step()
        assert len(first.ids) == before + 1
        assert scheduler.stats().rows - rows <= scheduler.stats().running + 4


def test_a_flood_of_short_requests_does_not_starve_a_long_one(base: Engine) -> None:
    """Requests whose documents are resident may overtake, but only so often."""
    engine = engine_with(base, max_running=1)
    run(engine, *submit(engine, (TEXTS, "Warm.")))
    running = submit(engine, (TEXTS, "Busy."))
    scheduler_of(engine).step()
    long = submit(engine, (MORE, "Long?"))[0]
    ended_before = 0
    for number in range(40):
        flood = submit(engine, (TEXTS, f"Short {number}?"), max_new_tokens=1)[0]
        run(engine, *running, flood) if not long.has_ended else None
        ended_before += not long.has_ended
    run(engine, long)
    assert 0 < ended_before <= Limits().most_overtaken + 1


def test_requests_that_share_resident_documents_are_preferred(base: Engine) -> None:
    engine = engine_with(base, max_running=1)
    run(engine, *submit(engine, (TEXTS, "Warm.")))
    other, sharing = submit(engine, (MORE, "Other?"), (TEXTS, "Sharing?"))
    run(engine, other, sharing)
    assert sharing.times.ttft_s < other.times.ttft_s


# --- memory ---------------------------------------------------------------------------------------------------------


def test_requests_wait_for_memory_and_all_are_answered(base: Engine) -> None:
    wanted = submit(alone := engine_with(base), *REQUESTS)
    run(alone, *wanted)
    rows = max(job.request.prompt.num_tokens for job in wanted) + NEW + 12
    own = 2 * rows * base.runner.geometry.bytes_per_token(base.runner.dtype)
    engine = engine_with(base, own_bytes=own)
    found = submit(engine, *REQUESTS)
    scheduler = scheduler_of(engine)
    while not all(job.has_ended for job in found):
        scheduler.step()
        assert scheduler.stats().own_bytes <= own
    assert all(same_up_to_a_tie(alone, one, other) for one, other in zip(found, wanted, strict=True))


def test_the_youngest_gives_its_memory_back_and_goes_on_where_it_was(base: Engine) -> None:
    """A request that was pre-empted loses time and no token."""
    wanted = submit(alone := engine_with(base), (TEXTS, "Old."), (MORE, "Young."), max_new_tokens=40)
    run(alone, *wanted)
    engine = engine_with(base, max_running=2, patience=2)
    scheduler = scheduler_of(engine)
    young = submit(engine, (MORE, "Young."), max_new_tokens=40)[0]
    while len(young.ids) < 5:
        scheduler.step()
    old = submit(engine, (TEXTS, "Old."), max_new_tokens=40)[0]
    young.number, old.number = old.number, young.number  # as if the other had come first and waited for memory
    blocked = scheduler._needed(old) - 1
    engine_limits, scheduler.limits = scheduler.limits, Limits(max_running=2, patience=2, own_bytes=blocked)
    while not scheduler.stats().preempted:
        scheduler.step()
    scheduler.limits = engine_limits
    run(engine, young, old)
    assert same_up_to_a_tie(alone, old, wanted[0])
    assert same_up_to_a_tie(alone, young, wanted[1])


def test_five_hundred_mixed_requests_with_cancels_leave_nothing_behind(base: Engine) -> None:
    engine = engine_with(base)
    scheduler, random = scheduler_of(engine), torch.Generator().manual_seed(0)
    jobs: list[Task] = []
    while len(jobs) < 500 or not scheduler.is_idle:
        if len(jobs) < 500 and len(scheduler._running) < 12:
            docs, question = REQUESTS[len(jobs) % len(REQUESTS)]
            jobs += submit(engine, (docs, f"{question} {len(jobs) % 7}"), max_new_tokens=1 + len(jobs) % 6)
        going = [job for job in jobs[-16:] if not job.has_ended]
        if going and int(torch.randint(5, (), generator=random)) == 0:
            going[int(torch.randint(len(going), (), generator=random))].cancel()
        scheduler.step()
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.own_bytes) == (0, 0, 0)
    assert stats.finished + stats.cancelled == 500
    assert stats.cancelled > 20
    assert engine.sessions is not None
    assert engine.sessions.residency.stats().leased_bytes == 0
    assert engine.sessions.beginnings.stats().leased_bytes == 0
    assert not engine.sessions._running


# --- ends -----------------------------------------------------------------------------------------------------------


def test_a_request_that_breaks_the_forward_fails_alone(base: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It breaks behind the last layer, when all rows of the batch have been written: they are computed once more."""
    engine = engine_with(base)
    jobs = submit(engine, *REQUESTS)
    poisoned, sound = jobs[2], session_module.forward

    def failing(runner: Any, runs: Any, embeds: torch.Tensor, **options: Any) -> torch.Tensor:
        logits = sound(runner, runs, embeds, **options)
        if poisoned.session is not None and poisoned.ids and any(run.own is poisoned.session.own for run in runs):
            raise RuntimeError("the device has had enough")
        return logits

    monkeypatch.setattr(session_module, "forward", failing)
    run(engine, *jobs)
    assert isinstance(poisoned.error, ModelError)
    assert "had enough" in str(poisoned.error)
    monkeypatch.undo()
    alone = engine_with(base)
    wanted = submit(alone, *REQUESTS)
    run(alone, *wanted)
    assert all(same_up_to_a_tie(alone, j, w) for j, w in zip(jobs, wanted, strict=True) if j is not poisoned)


def test_logits_that_are_no_numbers_fail_their_request_and_are_not_kept(base: Engine) -> None:
    engine = engine_with(base)
    assert engine.sessions is not None
    jobs = submit(engine, *REQUESTS[:3])
    sound = engine.sessions.advance

    def spoilt(work: list, drafts: list) -> None:  # type: ignore[type-arg]
        sound(work, drafts)
        session = jobs[0].session
        if session is not None and session.logits is not None:
            session.logits = torch.full_like(session.logits, torch.nan)

    engine.sessions.advance = spoilt  # type: ignore[method-assign]
    run(engine, *jobs)
    assert isinstance(jobs[0].error, ModelError)
    assert jobs[1].answer is not None
    again = submit(engine, REQUESTS[0])[0]
    scheduler_of(engine).step()
    assert again.session is None or again.session.known_links == 0


def test_a_store_that_fails_fails_the_requests_that_need_it(base: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(base)
    assert engine.sessions is not None
    sound = engine.sessions.residency.open

    def opened(segments: tuple[tuple[int, ...], ...], times: object = None) -> object:
        if len(segments) == len(MORE):
            raise StoreError("the disk is gone")
        return sound(segments, times)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.sessions.residency, "open", opened)
    jobs = submit(engine, *REQUESTS)
    run(engine, *jobs)
    assert [job.error is None for job in jobs] == [True, True, True, False, True, True]


@pytest.mark.parametrize("started", [False, True])
def test_an_error_that_nobody_foresaw_fails_one_request_and_stops_nothing(
    base: Engine, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    engine = engine_with(base)
    assert engine.sessions is not None
    sound = engine.sessions.begin

    def begin(request: Request, **options: Any) -> Session:
        if len(request.prompt.segments) == len(MORE):
            raise RuntimeError("not enough memory")
        return sound(request, **options)

    monkeypatch.setattr(engine.sessions, "begin", begin)
    if started:
        engine.start()
    jobs = submit(engine, *REQUESTS)
    if started:
        engine.stop()  # drains
    else:
        run(engine, *jobs)
    assert [job.error is None for job in jobs] == [True, True, True, False, True, True]
    assert "not enough memory" in str(jobs[3].error)


def test_a_caller_who_cannot_be_told_is_given_up_and_harms_nobody(
    base: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with(base)
    gone, other = submit(engine, *REQUESTS[:2])

    def raises() -> None:
        raise RuntimeError("the event loop is closed")

    gone.told = raises
    run(engine, gone, other)
    assert isinstance(gone.error, Cancelled)
    assert "the event loop is closed" in caplog.text
    assert other.answer is not None


def test_a_request_that_is_preempted_keeps_the_order_in_which_its_documents_were_read(base: Engine) -> None:
    engine = engine_with(base, max_running=1, patience=1)
    run(engine, *submit(engine, (TEXTS[::-1], "Known.")))
    young = submit(engine, (TEXTS, "Young."), order="reuse", max_new_tokens=30)[0]
    scheduler = scheduler_of(engine)
    while len(young.ids) < 3:
        scheduler.step()
    assert young.session is not None
    read = young.session.request.prompt.documents
    assert read == young.request.prompt.documents[::-1]
    old = submit(engine, (MORE, "Old."), max_new_tokens=2)[0]
    young.number, old.number = old.number, young.number
    scheduler._take_in()
    scheduler._wait_for_memory()
    engine.forget_beginnings()
    run(engine, old)
    while young.session is None:
        scheduler.step()
    assert young.session.request.prompt.documents == read
    run(engine, young)


def test_cancelled_requests_end_and_let_go(base: Engine) -> None:
    engine = engine_with(base, max_running=1)
    running, waiting = submit(engine, REQUESTS[0], REQUESTS[1])
    scheduler_of(engine).step()
    for job in (running, waiting):
        job.cancel()
    scheduler_of(engine).step()
    assert isinstance(running.error, Cancelled)
    assert isinstance(waiting.error, Cancelled)
    assert scheduler_of(engine).is_idle


def test_a_deadline_ends_a_request_and_says_how_far_it_was(base: Engine) -> None:
    engine = engine_with(base, max_running=1)
    running, waiting = submit(engine, REQUESTS[0], REQUESTS[1], deadline_s=60.0)
    while not running.session:
        scheduler_of(engine).step()
    running.deadline = waiting.deadline = perf_counter() - 1
    scheduler_of(engine).step()
    assert isinstance(running.error, DeadlineExceeded)
    assert "tokens of its answer were there" in str(running.error)
    assert "still waiting" in str(waiting.error)
    with pytest.raises(DeadlineExceeded):
        engine.generate(TEXTS, QUESTION, deadline_s=-1.0)


def test_an_engine_is_loaded_with_limits() -> None:
    limits = Limits(max_queue=1, prefill_rows=8)
    with loaded(links=None, limits=limits, device_bytes=80_000) as engine:
        submit(engine, REQUESTS[0])
        with pytest.raises(QueueFull):
            submit(engine, REQUESTS[1])
        assert scheduler_of(engine).limits == limits
        assert engine.sessions is not None
        assert engine.sessions.residency.stats().budget_bytes == 70_000
    with pytest.raises(InputError, match="step_rows is 0"):
        Limits(step_rows=0)


def test_a_full_queue_refuses_and_goes_on(base: Engine) -> None:
    engine = engine_with(base, max_queue=2)
    jobs = submit(engine, *REQUESTS[:2])
    with pytest.raises(QueueFull, match="2 requests wait, the queue holds 2"):
        submit(engine, REQUESTS[2])
    run(engine, *jobs)
    run(engine, *submit(engine, REQUESTS[2]))


def test_closing_gives_up_what_is_under_way(base: Engine) -> None:
    engine = engine_with(base, max_running=1)
    jobs = submit(engine, *REQUESTS[:3])
    scheduler_of(engine).step()
    scheduler_of(engine).close()
    assert all(isinstance(job.error, Cancelled) for job in jobs)
    with pytest.raises(Cancelled, match="closing"):
        submit(engine, REQUESTS[0])


def test_stopping_drains(base: Engine) -> None:
    engine = engine_with(base)
    engine.start()
    jobs = submit(engine, *REQUESTS)
    engine.stop()
    assert all(job.answer is not None for job in jobs)


def test_a_stream_that_is_closed_lets_go_at_once(base: Engine) -> None:
    engine = engine_with(base)
    stream = engine.stream(TEXTS, QUESTION, max_new_tokens=NEW)
    next(stream)
    stream.close()
    assert scheduler_of(engine).is_idle
    with pytest.raises(InputError):
        _ = stream.answer


def test_an_answer_follows_a_json_schema(base: Engine) -> None:
    import json

    schema = {
        "type": "object",
        "properties": {"open": {"type": "boolean"}},
        "required": ["open"],
        "additionalProperties": False,
    }
    engine = base.over(base.loader)
    answer = engine.generate(TEXTS, QUESTION, sampling=SamplingParams(json_schema=schema), max_new_tokens=60)
    assert isinstance(json.loads(answer.text)["open"], bool)
