"""Whatever happens to a scheduler, each request ends once, as it may, with its own tokens; planted faults are seen."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from engines import loaded
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from scheduler_machine import Alone, SchedulerMachine, walk

from kvlink.engine.drafts import Drafts
from kvlink.engine.leases import Leases
from kvlink.engine.scheduler import Scheduler
from kvlink.engine.session import Sessions
from kvlink.engine.task import Task
from kvlink.models.draft import Draft


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    with loaded(links=None) as base:
        yield Alone(base)


def test_the_scheduler_agrees_with_a_model_of_it(alone: Alone) -> None:
    examples = max(6, settings().max_examples // 15)  # more where all properties get more
    run_state_machine_as_test(
        lambda: SchedulerMachine(alone),
        settings=settings(max_examples=examples, stateful_step_count=20, deadline=None),
    )


def test_a_random_walk_meets_every_kind_of_end(alone: Alone) -> None:
    """So that the model is not held to what never happens."""
    seen = walk(SchedulerMachine(alone), rules=120)
    wanted = ("answered", "refused", "Cancelled", "DeadlineExceeded", "ModelError", "DeviceOverflow")
    more = ("together", "damaged", "encoded", "drafts beside answers", "preempted")
    assert not [name for name in (*wanted, *more) if not seen[name]], dict(seen)


def ends_without_letting_go(task: Task) -> None:
    task.opening = task.session = None


def never_gives_up(scheduler: Scheduler) -> None:
    pass


def mixes_logits(sessions: Sessions, work: Any, drafts: Any = (), *, sound: Any = Sessions.advance) -> None:
    sound(sessions, work, drafts)
    ready = [session for session, _ in work if session.logits is not None]
    for one, other in pairwise(ready):
        one.logits, other.logits = other.logits, one.logits


def keeps_what_nobody_wants(leases: Leases[Any], leased: Any) -> None:
    leased.count -= 1


def forgets_to_reset(draft: Draft, number: int, *, sound: Any = Draft.rows) -> Any:
    run, embeds = sound(draft, number)
    return run, embeds.roll(1, 0)


def encodes_never(drafts: Drafts, openings: Any, rows: int) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Task, "let_go", ends_without_letting_go),
        (Scheduler, "_give_up", never_gives_up),
        (Sessions, "advance", mixes_logits),
        (Leases, "leave", keeps_what_nobody_wants),
        (Draft, "rows", forgets_to_reset),
        (Drafts, "next", encodes_never),
    ],
)
def test_a_planted_fault_is_seen(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]
) -> None:
    for which in range(7):
        alone.ids(which)  # by what is sound
    machine = SchedulerMachine(alone)
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError):
        walk(machine, rules=60)
