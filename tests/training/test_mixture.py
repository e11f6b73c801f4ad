"""Sources are mixed by weight; what is held out shares nothing with what is learned from."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink import Document, InputError
from kvlink.training.data import QUESTION
from kvlink.training.example import Example, Question
from kvlink.training.mixture import PAPER, Share, mix, part, split


def example(name: str, documents: Sequence[str] = (), asked: str = "", answer: str = "a") -> Example:
    """Return an example; without documents of its own it has one that no other has."""
    texts = documents or [f"document of {name}"]
    question = Question(asked or QUESTION.format(question=f"What is {name}?"), answer)
    return Example(name, tuple(Document(text) for text in texts), (question,), source=name.partition("-")[0])


def examples(name: str, number: int) -> list[Example]:
    return [example(f"{name}-{at}") for at in range(number)]


# --- mixtures -------------------------------------------------------------------------------------------------------


def test_the_papers_weights_sum_to_a_hundred() -> None:
    assert sum(PAPER.values()) == 100
    assert (PAPER["qa"], PAPER["qa in blocks"], PAPER["summaries"]) == (10, 10, 5)


def test_a_mixture_takes_from_each_source_by_its_weight() -> None:
    mixed = mix([Share(name, float(weight), examples(name, 200)) for name, weight in PAPER.items()], total=200)
    assert mixed.taken == {name: 2 * weight for name, weight in PAPER.items()}
    assert mixed.missing == {}
    assert len({one.id for one in mixed.examples}) == 200


def test_every_stretch_of_a_mixture_is_mixed_by_the_weights() -> None:
    mixed = mix([Share("a", 3.0, examples("a", 300)), Share("b", 1.0, examples("b", 300))], total=200)
    for begin in range(0, 200, 20):
        assert 4 <= sum(one.source == "b" for one in mixed.examples[begin : begin + 20]) <= 6


def test_what_a_source_does_not_have_is_missing_and_nothing_stands_in_for_it() -> None:
    mixed = mix([Share("a", 1.0, examples("a", 3)), Share("b", 1.0, examples("b", 90)), Share("c", 2.0, [])], total=40)
    assert mixed.taken == {"a": 3, "b": 10, "c": 0}
    assert mixed.missing == {"a": 7, "c": 20}
    assert len(mixed.examples) == 13


def test_the_seed_decides_which_examples_are_taken() -> None:
    shares = [Share("a", 1.0, examples("a", 100)), Share("b", 1.0, examples("b", 100))]
    assert mix(shares, total=20, seed=1) == mix(shares, total=20, seed=1)
    assert set(mix(shares, total=20, seed=1).examples) != set(mix(shares, total=20, seed=2).examples)


@given(st.integers(0, 60), st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(any))
def test_any_weights_give_whole_numbers_that_sum_to_the_total(total: int, weights: list[float]) -> None:
    shares = [Share(str(at), weight, examples(str(at), 60)) for at, weight in enumerate(weights)]
    mixed = mix(shares, total=total)
    assert len(mixed.examples) == total
    for share in shares:
        assert abs(mixed.taken[share.name] - total * share.weight / sum(weights)) < 1


@pytest.mark.parametrize("weights", [(0.0, 0.0), (1.0, -1.0), (2.0, float("nan"))])
def test_weights_that_are_none_are_refused(weights: tuple[float, float]) -> None:
    shares = [Share(name, weight, examples(name, 3)) for name, weight in zip("ab", weights, strict=True)]
    with pytest.raises(InputError, match="no weight is below 0, and their sum is above it"):
        mix(shares, total=3)


def test_shares_and_examples_need_names_of_their_own() -> None:
    with pytest.raises(InputError, match="shares have the name 'a'"):
        mix([Share("a", 1.0, []), Share("a", 1.0, [])], total=0)
    with pytest.raises(InputError, match="examples have the id 'x-0'"):
        mix([Share("a", 1.0, examples("x", 1)), Share("b", 1.0, examples("x", 1))], total=2)


# --- parts ----------------------------------------------------------------------------------------------------------


def test_parts_have_everything_once_and_about_the_share() -> None:
    learned, held_out = part(range(1000), key=str, share=0.1, seed=3)
    assert sorted(learned + held_out) == list(range(1000))
    assert 70 <= len(held_out) <= 130
    assert part(range(1000), key=str, share=0.1, seed=4)[1] != held_out


def test_what_was_held_out_stays_so_when_more_comes() -> None:
    _, before = part(range(100), key=str, share=0.2)
    _, after = part(range(200), key=str, share=0.2)
    assert [thing for thing in after if thing < 100] == before


def test_things_with_one_key_stay_together() -> None:
    learned, held_out = part(range(300), key=lambda thing: str(thing % 30), share=0.5)
    assert learned
    assert held_out
    assert not {thing % 30 for thing in learned} & {thing % 30 for thing in held_out}


@pytest.mark.parametrize(("share", "held_out"), [(0.0, 0), (1.0, 50)])
def test_nothing_or_everything_can_be_held_out(share: float, held_out: int) -> None:
    assert len(part(range(50), key=str, share=share)[1]) == held_out


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InputError, match="cannot be held out; it is between 0 and 1"):
        part(range(3), key=str, share=share)


# --- splits ---------------------------------------------------------------------------------------------------------

FOLDER = [example(f"f-{at}", [f"page {at % 10}", f"page {(at + 1) % 10}"]) for at in range(40)]


def documents(part_of: Sequence[Example]) -> set[str]:
    return {document.text for one in part_of for document in one.documents}


def sets(part_of: Sequence[Example]) -> set[frozenset[str]]:
    return {frozenset(document.text for document in one.documents) for one in part_of}


def asked(part_of: Sequence[Example]) -> set[str]:
    return {question.text for one in part_of for question in one.questions}


def test_a_split_has_every_example_once_in_its_order() -> None:
    given = examples("a", 50)
    halves = split(given, held_out=20)
    assert len(halves.held_out) == 20
    assert [one for one in given if one in halves.learned] == list(halves.learned)
    assert sorted(one.id for one in halves.learned + halves.held_out) == sorted(one.id for one in given)


def test_the_seed_decides_who_is_held_out_and_the_order_does_not() -> None:
    given = examples("a", 50)
    ids = {one.id for one in split(given, held_out=10, seed=1).held_out}
    assert {one.id for one in split(given[::-1], held_out=10, seed=1).held_out} == ids
    assert {one.id for one in split(given, held_out=10, seed=2).held_out} != ids


def test_no_document_of_a_held_out_example_is_learned_from() -> None:
    given = [example(f"a-{at}", [f"page {at // 3}", f"own {at}"]) for at in range(60)]
    for seed in range(10):
        halves = split(given, held_out=15, seed=seed)
        assert 13 <= len(halves.held_out) <= 15
        assert not documents(halves.held_out) & documents(halves.learned)


def test_sets_of_one_folder_can_be_held_out_though_their_documents_come_again() -> None:
    again = example("again", [one.text for one in reversed(FOLDER[0].documents)])
    for seed in range(20):
        halves = split([*FOLDER, again], held_out=8, apart="sets", seed=seed)
        assert halves.held_out
        assert not sets(halves.held_out) & sets(halves.learned)


@pytest.mark.parametrize("apart", ["documents", "sets"])
def test_a_question_is_never_in_both(apart: str) -> None:
    given = [example(f"a-{at}", asked=f"Question: Who is {at % 20}?", answer=str(at)) for at in range(60)]
    for seed in range(10):
        halves = split(given, held_out=12, apart=apart, seed=seed)  # type: ignore[arg-type]
        assert halves.held_out
        assert not asked(halves.held_out) & asked(halves.learned)


def test_an_instruction_may_be_in_both_where_its_answers_differ() -> None:
    given = [example(f"a-{at}", asked="Summarize the documents.", answer=f"summary {at // 2}") for at in range(40)]
    halves = split(given, held_out=10)
    answers = [{one.questions[0].answer for one in half} for half in (halves.held_out, halves.learned)]
    assert len(halves.held_out) == 10
    assert not answers[0] & answers[1]


def test_examples_with_one_id_stay_together() -> None:
    given = [*examples("a", 30), *(example(f"a-{at}", [f"other {at}"], f"Question: {at}?") for at in range(30))]
    halves = split(given, held_out=19)
    assert len(halves.held_out) == 18
    assert not {one.id for one in halves.held_out} & {one.id for one in halves.learned}


def test_nothing_is_held_out_where_nothing_is_asked_for() -> None:
    assert split(examples("a", 3), held_out=0).learned == tuple(examples("a", 3))
    assert split([], held_out=0).learned == ()


@pytest.mark.parametrize("held_out", [-1, 3, 4])
def test_some_examples_have_to_be_left_to_learn_from(held_out: int) -> None:
    with pytest.raises(InputError, match=f"{held_out} of 3 examples cannot be held out"):
        split(examples("a", 3), held_out=held_out)


def test_examples_that_all_hang_together_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(InputError, match=r"none of 40 examples .* Hold documents .* before composing, or ask for sets"):
        split(FOLDER, held_out=8)
    same = [example(f"s-{at}", ["one", "two"]) for at in range(9)]
    with pytest.raises(InputError, match=r"none of 9 examples .* before composing$"):
        split(same, held_out=3, apart="sets")
