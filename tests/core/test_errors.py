"""The tree that is drawn in the docstring is the tree of the classes."""

import inspect
import re

import pytest

from kvlink.core import errors
from kvlink.core.errors import ContextOverflow, InputError, KVLinkError, KVLinkWarning

CLASSES = {
    name: member
    for name, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, KVLinkError) and member.__module__ == errors.__name__
}


def drawn_tree() -> dict[str, str | None]:
    """Return for each drawn class the one that it hangs from."""
    parents: dict[str, str | None] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").partition("KVLinkWarning")[0].splitlines():
        if found := re.match(r"^    (?P<branches>(?:\|  |   )*(?:\|- )?)(?P<name>KVLinkError|[A-Z]\w+)\b", line):
            depth = len(found["branches"]) // 3
            above[depth:] = [found["name"]]
            parents[found["name"]] = above[depth - 1] if depth else None
    return parents


def test_the_drawn_tree_is_the_tree_of_the_classes():
    real = {
        name: next((base.__name__ for base in member.__bases__ if issubclass(base, KVLinkError)), None)
        for name, member in CLASSES.items()
    }
    assert drawn_tree() == real
    assert len(real) > 5


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_says_what_it_means_and_can_be_caught_by_its_base(name):
    member = CLASSES[name]
    assert member.__doc__
    assert issubclass(member, Exception)
    figures = {"over": 1, "limit": 2} if member is ContextOverflow else {}
    with pytest.raises(KVLinkError, match="what was asked"):
        raise member("what was asked", **figures)


def test_an_input_error_is_a_value_error_and_no_other_error_is():
    assert {name for name, member in CLASSES.items() if issubclass(member, ValueError)} == {
        name for name, member in CLASSES.items() if issubclass(member, InputError)
    }


def test_an_overflow_carries_its_figures():
    error = ContextOverflow("7 tokens too many", over=7, limit=2048)
    assert (str(error), error.over, error.limit) == ("7 tokens too many", 7, 2048)


def test_the_warning_is_no_error():
    assert issubclass(KVLinkWarning, UserWarning)
    assert not issubclass(KVLinkWarning, KVLinkError)
