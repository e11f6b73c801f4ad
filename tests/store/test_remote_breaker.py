"""The breaker alone: when it lets a call through."""

from concurrent.futures import ThreadPoolExecutor

from specimens import Clock

from kvlink.store.breaker import Breaker


def test_it_begins_closed_and_opens_with_a_failure() -> None:
    breaker = Breaker(pause_s=10.0, clock=Clock(0.0))
    assert breaker.admit()
    assert not breaker.is_open
    breaker.failed("gone")
    assert not breaker.admit()
    assert breaker.is_open
    assert breaker.reason == "gone"


def test_after_a_pause_one_call_tries_and_the_others_wait() -> None:
    clock = Clock(0.0)
    breaker = Breaker(pause_s=10.0, clock=clock)
    breaker.failed("gone")
    clock.now = 9.9
    assert not breaker.admit()
    clock.now = 10.0
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: breaker.admit(), range(64))) == 1


def test_a_trial_that_succeeds_closes_it_and_one_that_fails_does_not() -> None:
    clock = Clock(0.0)
    breaker = Breaker(pause_s=10.0, clock=clock)
    breaker.failed("gone")
    clock.now = 10.0
    assert breaker.admit()
    breaker.failed("still gone")
    clock.now = 19.0
    assert not breaker.admit()
    clock.now = 20.0
    assert breaker.admit()
    breaker.succeeded()
    assert breaker.admit()
    assert breaker.admit()
    assert not breaker.is_open


def test_a_trial_that_never_ends_is_followed_by_another() -> None:
    clock = Clock(0.0)
    breaker = Breaker(pause_s=10.0, clock=clock)
    breaker.failed("gone")
    clock.now = 10.0
    assert breaker.admit()
    clock.now = 20.0
    assert breaker.admit()
