"""Methods of the comparison: one interface, one method per file, found through the entry points `kvlink.methods`.

A method is asked for by its name with parameters, such as `concat_reencoded(sink=none)`.
"""

import re
from importlib.metadata import EntryPoint, entry_points

from kvlink.core.errors import InputError
from kvlink.evaluation.methods.base import Method, Prefilled

__all__ = ["Method", "Prefilled", "available", "method_named", "split_names"]

GROUP = "kvlink.methods"

_CALL = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*")


def available() -> dict[str, EntryPoint]:
    """Return all installed methods by name, not loaded yet; another package adds one with an entry point."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def method_named(asked: str) -> Method:
    """Return the method that is asked for.

    Raises:
        InputError: No method has this name (the message lists what there is), it cannot be loaded, or it does not
            take these parameters.
    """
    found = available()
    name, parameters = parse_call(asked)
    if name not in found:
        raise InputError(f"there is no method {name!r}; there are {', '.join(sorted(found))}")
    try:
        method: type[Method] = found[name].load()
    except (ImportError, AttributeError) as error:
        raise InputError(f"method {name!r} ({found[name].value}) cannot be loaded: {error}") from error
    try:
        return method(**parameters)
    except TypeError as error:
        raise InputError(f"method {asked!r}: {error}") from error


def parse_call(asked: str) -> tuple[str, dict[str, str]]:
    """Split `name(a=1, b=x)` into name and parameters.

    Raises:
        InputError: It has another form.
    """
    match = _CALL.fullmatch(asked)
    pairs = [part.split("=", 1) for part in (match[2] or "").split(",") if part.strip()] if match else []
    if not match or any(len(pair) != 2 for pair in pairs):
        raise InputError(f"{asked!r} is not of the form name or name(parameter=value, ...)")
    return match[1], {key.strip(): value.strip() for key, value in pairs}


def split_names(text: str) -> list[str]:
    """Split at commas outside parentheses; what is named twice is taken once."""
    return list(dict.fromkeys(part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip()))
