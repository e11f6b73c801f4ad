"""Running estimates: a latency and a rate from measurements, and a verdict only when both sides are known."""

import pytest

from kvlink.engine.rates import LEAST, LOOK_AGAIN, Line, Rates


def rates_of(
    load_s: float, encode_s: float, *, size: int = 46_000_000, tokens: int = 1000, times: int = LEAST
) -> Rates:
    rates = Rates()
    for _ in range(times):
        rates.loaded("remote", size, load_s)
        rates.encoded(tokens, encode_s)
    return rates


def test_latency_and_rate_are_told_apart() -> None:
    line = Line()
    for amount in (10, 500, 90, 1000):
        line.add(amount, 0.02 + amount / 100)
    assert line.at(0) == pytest.approx(0.02)
    assert line.at(2000) == pytest.approx(20.02)


def test_measurements_of_one_size_give_a_rate() -> None:
    line = Line()
    for _ in range(5):
        line.add(100, 2.0)
    assert line.at(300) == pytest.approx(6.0)


@pytest.mark.parametrize("points", [[(10, 5.0), (1000, 1.0)], [(10, 0.001), (1000, 9.0)], [(0, 1.0), (0, 3.0)]])
def test_no_estimate_is_negative(points: list[tuple[int, float]]) -> None:
    line = Line()
    for amount, seconds in points * 3:
        line.add(amount, seconds)
    assert all(line.at(amount) >= 0 for amount in (0, 1, 10, 10_000))


def test_old_measurements_fade() -> None:
    line = Line()
    for seconds in (9.0,) * 5 + (1.0,) * 40:
        line.add(100, seconds)
    assert line.at(100) == pytest.approx(1.0, rel=0.15)


def test_the_reason_names_bytes_place_and_both_times() -> None:
    found = rates_of(2.1, 0.4).refusal("remote", 46_000_000, 1000)
    assert found == "loading 46 MB from remote takes about 2.1 s, encoding 0.4 s"


def test_a_load_that_is_as_fast_is_made() -> None:
    assert rates_of(0.4, 0.4).refusal("remote", 46_000_000, 1000) == ""
    assert rates_of(0.4, 0.4).may_refuse(46_000_000, 1000) is False


def test_nothing_is_refused_before_both_sides_were_measured_a_few_times() -> None:
    for few in (rates_of(2.1, 0.4, times=LEAST - 1), Rates()):
        assert few.refusal("remote", 46_000_000, 1000) == ""
        assert few.may_refuse(46_000_000, 1000) is False
    only_loads = Rates()
    for _ in range(LEAST):
        only_loads.loaded("remote", 1, 9.0)
    assert only_loads.refusal("remote", 1, 1) == ""


def test_one_slow_tier_says_nothing_of_another() -> None:
    rates = rates_of(2.1, 0.4)
    assert rates.may_refuse(46_000_000, 1000) is True
    assert rates.refusal("disk", 46_000_000, 1000) == ""


def test_now_and_then_a_slow_tier_is_looked_at_again() -> None:
    rates = rates_of(2.1, 0.4)
    found = [bool(rates.refusal("remote", 46_000_000, 1000)) for _ in range(2 * LOOK_AGAIN)]
    assert found == ([True] * (LOOK_AGAIN - 1) + [False]) * 2


def test_loads_one_after_another_are_told_for_the_slowest_tier() -> None:
    rates = rates_of(2.0, 0.4, size=100)
    assert Rates().longest_s([100]) is None
    for _ in range(LEAST - 1):
        rates.loaded("disk", 100, 9.0)
    assert rates.longest_s([100, 50]) == pytest.approx(3.0)
    rates.loaded("disk", 100, 9.0)
    assert rates.longest_s([100, 50]) == pytest.approx(13.5)
    assert rates.longest_s([]) == 0
