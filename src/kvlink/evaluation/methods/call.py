"""How a method is asked for: `name(value, parameter=value)`; what wraps another takes it as a value: `int8(kvlink)`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvlink.core.errors import InputError

_CALL = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*")


@dataclass(frozen=True, slots=True)
class Call:
    """What was asked for, in parts.

    Attributes:
        values: Those that stand there without a name.
        parameters: Those with one.
    """

    name: str
    values: tuple[str, ...]
    parameters: dict[str, str]


def parse(asked: str) -> Call:
    """Take a call apart.

    Raises:
        InputError: It has another form.
    """
    match = _CALL.fullmatch(asked)
    try:
        parts = [part for part in split_parts(match[2] or "") if part] if match else []
    except ValueError:
        match, parts = None, []
    if not match:
        raise not_a_call(asked)
    values: list[str] = []
    parameters: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if equals and key.strip().isidentifier():
            parameters[key.strip()] = value.strip()
        else:
            values.append(part)
    return Call(match[1], tuple(values), parameters)


def not_a_call(asked: str) -> InputError:
    """Return the error that shows the form."""
    return InputError(f"{asked!r} is not of the form name or name(parameter=value, ...)")


def split_parts(text: str) -> Iterator[str]:
    """Yield what stands between commas outside parentheses, without spaces around it.

    Raises:
        ValueError: A parenthesis is closed that was not opened, or not closed.
    """
    depth, part = 0, ""
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            raise ValueError("a parenthesis is closed that was not opened")
        if character == "," and not depth:
            yield part.strip()
            part = ""
        else:
            part += character
    if depth:
        raise ValueError("a parenthesis is not closed")
    yield part.strip()
