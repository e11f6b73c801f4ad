"""The page of the Python interface knows every public name, every argument and every field."""

import inspect
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from pages import DOCS, inline_code

import kvlink
from kvlink.models.probe import ProbeReport
from kvlink.store import ObjectStat, StoreStats

PAGE = DOCS / "reference" / "python.md"
VALUES = [getattr(kvlink, name) for name in kvlink.__all__ if is_dataclass(getattr(kvlink, name))]


def public_methods(cls: type) -> dict[str, Any]:
    """Return the methods of a class that are for its users, by name."""
    homes = [one for one in cls.__mro__ if one.__module__.startswith("kvlink")]
    return {name: getattr(cls, name) for one in homes for name in vars(one) if not name.startswith("_")}


@pytest.mark.parametrize("name", kvlink.__all__)
def test_every_public_name_has_its_place_on_the_page(name: str) -> None:
    text = PAGE.read_text("utf-8")
    assert f"## `{name}`" in text or f"| `{name}` |" in text, f"{name} has neither a heading nor a row on {PAGE}"


@pytest.mark.parametrize("cls", [*VALUES, ProbeReport, ObjectStat, StoreStats], ids=lambda cls: cls.__name__)
def test_every_field_of_a_value_stands_on_the_page(cls: Any) -> None:
    missing = {field.name for field in fields(cls) if not field.name.startswith("_")} - inline_code(PAGE)
    assert not missing, f"{cls.__name__}: {sorted(missing)}"


def test_defaults_of_sampling_are_those_of_the_code() -> None:
    text = PAGE.read_text("utf-8")
    for field in fields(kvlink.SamplingParams):
        assert f"| `{field.name}` | `{field.default!r}` |" in text, field.name


@pytest.mark.parametrize(
    "cls",
    [
        kvlink.Chat,
        kvlink.DiskStore,
        kvlink.Engine,
        kvlink.Job,
        kvlink.Library,
        kvlink.MemoryStore,
        kvlink.SamplingParams,
        kvlink.Stream,
    ],
)
def test_every_method_and_argument_stands_on_the_page(cls: type) -> None:
    known = inline_code(PAGE)
    heads = {word.partition("(")[0].rpartition(".")[2] for word in known}
    for name, method in public_methods(cls).items():
        assert name in heads, f"{cls.__name__}.{name}"
        if cls is kvlink.Engine and callable(method):
            missing = set(inspect.signature(method).parameters) - {"self"} - known
            assert not missing, f"{cls.__name__}.{name}: {sorted(missing)}"
