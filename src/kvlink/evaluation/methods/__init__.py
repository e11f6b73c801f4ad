"""Methods of the comparison: one interface, one method per file, found through the entry points `kvlink.methods`.

A method is asked for by its name with parameters, such as `concat_reencoded(sink=none)`; some wrap another one, such as
`int8(kvlink)`.
"""

from importlib.metadata import EntryPoint, entry_points

from kvlink.core.errors import InputError
from kvlink.evaluation.methods.base import Method, Prefilled
from kvlink.evaluation.methods.call import not_a_call, parse, split_parts

__all__ = ["Method", "Prefilled", "available", "method_named", "split_names"]

GROUP = "kvlink.methods"


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
    call = parse(asked)
    if call.name not in found:
        raise InputError(f"there is no method {call.name!r}; there are {', '.join(sorted(found))}")
    try:
        method: type[Method] = found[call.name].load()
    except (ImportError, AttributeError) as error:
        raise InputError(f"method {call.name!r} ({found[call.name].value}) cannot be loaded: {error}") from error
    names = [name for name in method.takes if name not in call.parameters]
    if len(call.values) > len(names):
        raise not_a_call(asked)
    try:
        return method(**dict(zip(names, call.values, strict=False)), **call.parameters)
    except TypeError as error:
        raise InputError(f"method {asked!r}: {error}") from error


def parse_call(asked: str) -> tuple[str, dict[str, str]]:
    """Split `name(a=1, b=x)` into name and parameters.

    Raises:
        InputError: It has another form.
    """
    call = parse(asked)
    if call.values:
        raise not_a_call(asked)
    return call.name, call.parameters


def split_names(text: str) -> list[str]:
    """Split at commas outside parentheses; what is named twice is taken once.

    Raises:
        InputError: A parenthesis has no partner.
    """
    try:
        return [name for name in dict.fromkeys(split_parts(text)) if name]
    except ValueError as error:
        raise InputError(f"{text!r}: {error}") from error
