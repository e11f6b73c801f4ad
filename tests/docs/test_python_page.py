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
    return {name: getattr(cls, name) for name in vars(cls) if not name.startswith("_")}


@pytest.mark.parametrize("name", kvlink.__all__)
def test_every_public_name_has_its_place_on_the_page(name: str) -> None:
    text = PAGE.read_text("utf-8")
    assert f"## `{name}`" in text or f"| `{name}` |" in text, f"{name} has neither a heading nor a row on {PAGE}"


@pytest.mark.parametrize("cls", [*VALUES, ProbeReport, ObjectStat, StoreStats], ids=lambda cls: cls.__name__)
def test_every_field_of_a_value_stands_on_the_page(cls: Any) -> None:
    missing = {field.name for field in fields(cls)} - inline_code(PAGE)
    assert not missing, f"{cls.__name__}: {sorted(missing)}"


@pytest.mark.parametrize("cls", [kvlink.Engine, kvlink.Stream, kvlink.DiskStore, kvlink.MemoryStore])
def test_every_method_and_argument_stands_on_the_page(cls: type) -> None:
    known = inline_code(PAGE)
    heads = {word.partition("(")[0].rpartition(".")[2] for word in known}
    for name, method in public_methods(cls).items():
        assert name in heads, f"{cls.__name__}.{name}"
        if cls is kvlink.Engine and callable(method):
            missing = set(inspect.signature(method).parameters) - {"self"} - known
            assert not missing, f"{cls.__name__}.{name}: {sorted(missing)}"
