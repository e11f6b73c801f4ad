"""A sweep adds links until they are not worth their cost, and says why it stopped."""

from typing import Any

import pytest

from kvlink.core.errors import InputError
from kvlink.training.sweep import parse_counts, sweep


def swept(found: dict[int, float], **options: Any) -> tuple[list[int], int, str]:
    tried: list[int] = []
    result = sweep(found, lambda count: tried.append(count) or found[count], **options)
    assert [count for count, _ in result.tried] == tried
    assert [kl for _, kl in result.tried] == [found[count] for count in tried]
    return tried, result.advice, result.reason


def test_it_stops_where_one_more_step_gains_too_little() -> None:
    tried, advice, reason = swept({4: 0.200, 6: 0.150, 8: 0.149, 10: 0.010})
    assert (tried, advice) == ([4, 6, 8], 6)
    assert reason == "8 links come to 0.1490, 6 to 0.1500: less than 2% better"


def test_it_stops_where_more_links_are_worse() -> None:
    assert swept({4: 0.2, 6: 0.3, 8: 0.1})[:2] == ([4, 6], 4)


def test_where_every_step_gains_the_last_is_advised_and_more_may_gain() -> None:
    tried, advice, reason = swept({4: 0.3, 6: 0.2, 8: 0.1})
    assert (tried, advice) == ([4, 6, 8], 8)
    assert reason == "8 links come to 0.1000, and each step gained 2% or more: more of them may gain, too"


@pytest.mark.parametrize(("second", "goes_on"), [(0.900, True), (0.901, False)])
def test_the_gain_that_is_asked_for_is_enough(second: float, goes_on: bool) -> None:
    tried, _, _ = swept({4: 1.0, 6: second, 8: 0.1}, gain=0.1)
    assert (len(tried) == 3) is goes_on


def test_where_the_whole_curve_is_wanted_the_advice_is_the_same() -> None:
    found = {250: 0.200, 500: 0.150, 1000: 0.149, 2000: 0.100}
    tried, advice, reason = swept(found, of="rows", whole=True)
    assert (tried, advice) == ([250, 500, 1000, 2000], 500)
    assert reason == "1000 rows come to 0.1490, 500 to 0.1500: less than 2% better"


def test_one_number_is_advised_without_a_word_on_gains() -> None:
    assert swept({6: 0.3}) == ([6], 6, "6 links come to 0.3000, and nothing else was tried")


def test_no_numbers_are_nothing_to_compare() -> None:
    with pytest.raises(InputError, match="no number of links is given"):
        sweep([], lambda count: 0.0)


@pytest.mark.parametrize(
    ("text", "wanted"), [("4,6,8", [4, 6, 8]), ("8, 4,4", [4, 8]), ("6", [6]), ("4,6,", [4, 6]), (" 12 ", [12])]
)
def test_counts_are_numbers_in_their_order(text: str, wanted: list[int]) -> None:
    assert parse_counts(text) == wanted


@pytest.mark.parametrize("text", ["", ",", "0,2", "-1", "four", "4;6", "1.5"])
def test_other_counts_are_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(InputError, match=r"is no list of numbers of link tokens such as 4,6,8"):
        parse_counts(text)
