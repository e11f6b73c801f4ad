"""Arms run in turn, every counted sample is kept, and medians are medians."""

from collections.abc import Callable

import pytest

from kvlink.evaluation.timing import Samples, alternate


def arms(order: list[str], *names: str) -> dict[str, Callable[[], None]]:
    def arm(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    return {name: arm(name) for name in names}


def test_arms_alternate() -> None:
    order: list[str] = []
    alternate(arms(order, "a", "b"), repeats=3, warmup=1)
    assert order == ["a", "b"] * 4


@pytest.mark.parametrize(("warmup", "repeats"), [(0, 1), (1, 3), (2, 2)])
def test_every_counted_round_gives_one_sample_and_no_other_does(warmup: int, repeats: int) -> None:
    found = alternate(arms([], "a", "b"), repeats=repeats, warmup=warmup)
    assert [len(samples.seconds) for samples in found.values()] == [repeats, repeats]
    assert all(seconds >= 0 for samples in found.values() for seconds in samples.seconds)


def test_an_arm_may_bring_its_own_time_and_its_parts() -> None:
    own = iter([(9.0, {"load_s": 9.0}), (1.0, {"load_s": 0.5}), (3.0, {"load_s": 1.5})])
    found = alternate({"a": lambda: next(own)}, repeats=2, warmup=1)["a"]
    assert found.seconds == [1.0, 3.0]
    assert found.to_json()["split_s"] == {"load_s": 1.0}


def test_an_arm_without_parts_has_none() -> None:
    assert alternate(arms([], "a"), repeats=1)["a"].to_json()["split_s"] == {}


def test_progress_is_told_of_every_run() -> None:
    told: list[None] = []
    alternate(arms([], "a", "b"), repeats=3, warmup=2, progress=lambda: told.append(None))
    assert len(told) == 10


def test_median_and_quartiles_are_those_of_all_samples() -> None:
    samples = Samples([5.0, 1.0, 2.0, 4.0, 3.0])
    assert samples.median == 3.0
    assert samples.to_json() == {
        "median_s": 3.0,
        "q1_s": 2.0,
        "q3_s": 4.0,
        "samples_s": [5.0, 1.0, 2.0, 4.0, 3.0],
        "split_s": {},
    }
