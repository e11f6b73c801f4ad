"""Engines with a scheduler of their own over one tiny model and one store, requests, and what answers are held to."""

import pytest
from engines import QUESTION, TEXTS

from kvlink.engine.build import sessions_of
from kvlink.engine.engine import Engine
from kvlink.engine.limits import Limits
from kvlink.engine.scheduler import Scheduler
from kvlink.engine.task import Task
from kvlink.models.links import LinkTokens

NEW = 10
MORE = [f"Hut {number} is painted {color}." for number, color in enumerate(("red", "blue", "green", "white"), 1)]
REQUESTS = [
    (TEXTS, QUESTION),
    (TEXTS[::-1], "Why?"),
    ([], "Who are you?"),
    (MORE, "Which hut is red?"),
    ([*MORE[:2], TEXTS[0]], "When?"),
    (TEXTS, "How high?"),
]


def engine_with(base: Engine, *, budget: int | None = None, num_links: int = 3, **limits: int) -> Engine:
    """Return an engine over the same model and store, with a device tier of its own and random link tokens."""
    links = LinkTokens.random(base.runner.embedding, num_links=num_links) if num_links else None
    sessions = sessions_of(base.loader, links=links, bundle="random", device_budget_bytes=budget)
    return Engine(
        runner=base.runner,
        prompter=base.prompter,
        loader=base.loader,
        report=base.report,
        links=links,
        sessions=sessions,
        limits=Limits(**limits),
    )


def scheduler_of(engine: Engine) -> Scheduler:
    assert engine._worker is not None
    return engine._worker.scheduler


def run(engine: Engine, *jobs: Task, steps: int = 10_000) -> None:
    """Run steps until these jobs have ended."""
    scheduler = scheduler_of(engine)
    for _ in range(steps):
        if all(job.has_ended for job in jobs):
            return
        with scheduler.lock:
            scheduler.step()
    pytest.fail(f"{sum(not job.has_ended for job in jobs)} jobs have not ended after {steps} steps")


def submit(engine: Engine, *requests: tuple[list[str] | tuple[str, ...], str], **options: object) -> list[Task]:
    jobs = [engine.job(docs, question, **{"max_new_tokens": NEW, **options}) for docs, question in requests]  # type: ignore[arg-type]
    for job in jobs:
        scheduler_of(engine).submit(job)
    return jobs


def ids_of(job: Task) -> tuple[int, ...]:
    assert job.answer is not None, job.error
    return job.answer.ids


def same_up_to_a_tie(engine: Engine, found: Task, wanted: Task) -> bool:
    """Whether two answers are alike, or part where two logits tie within 1e-4."""
    ours, theirs = ids_of(found), ids_of(wanted)
    at = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
    if at is None:
        return len(ours) == len(theirs)
    assert engine.sessions is not None
    session = engine.sessions.begin(wanted.request, room=NEW, said=theirs[:at])
    engine.sessions.advance([(session, len(session.left))])
    assert session.logits is not None
    logits = session.logits
    engine.sessions.end(session)
    return abs(float(logits[ours[at]] - logits[theirs[at]])) < 1e-4
