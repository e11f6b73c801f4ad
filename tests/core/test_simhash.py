"""Hashes of like texts are alike, of unlike ones are not."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.core.simhash import BITS, NEAR, distance, near_pairs, simhash

hashes = st.integers(0, 2**BITS - 1)


def words(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefghij", k=5)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(10))
def test_one_word_in_two_hundred_leaves_texts_near(seed: int) -> None:
    old = words(200, seed)
    new = [*old[:100], "another", *old[101:]]
    assert distance(simhash(" ".join(old)), simhash(" ".join(new))) <= NEAR


@pytest.mark.parametrize("seed", range(10))
def test_unrelated_texts_are_far_apart(seed: int) -> None:
    one, other = (simhash(" ".join(words(200, 100 * seed + n))) for n in range(2))
    assert 15 <= distance(one, other) <= 49


def test_the_greater_the_edit_the_greater_the_distance_in_the_mean() -> None:
    def mean(count: int) -> float:
        texts = [(old := words(200, seed), [*words(count, seed + 1000), *old[count:]]) for seed in range(20)]
        return sum(distance(simhash(" ".join(old)), simhash(" ".join(new))) for old, new in texts) / len(texts)

    found = [mean(count) for count in (0, 2, 20, 100, 200)]
    assert found[0] == 0
    assert found == sorted(found)
    assert len(set(found)) == 5


@pytest.mark.parametrize("text", ["", " \n", "one", "one two", "\ud800 lone"], ids=ascii)
def test_any_text_has_a_hash(text: str) -> None:
    assert 0 <= simhash(text) < 2**BITS
    assert simhash(text) == simhash(text)


def test_order_of_words_counts() -> None:
    assert simhash("one two three four") != simhash("four three two one")


@given(st.lists(hashes, max_size=12), st.integers(0, BITS))
def test_near_pairs_are_those_of_a_plain_search(found: list[int], at_most: int) -> None:
    pairs = [(i, j, distance(a, b)) for j, b in enumerate(found) for i, a in enumerate(found[:j])]
    wanted = sorted((pair for pair in pairs if pair[2] <= at_most), key=lambda pair: (pair[2], pair[0], pair[1]))
    assert near_pairs(found, at_most=at_most) == wanted
