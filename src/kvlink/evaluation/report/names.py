"""What names of methods say: which differ in one number alone, and which in the codec alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlink.core.errors import InputError
from kvlink.evaluation.methods.call import Call, parse

WRAPPERS = ("int8", "int4", "prune")


@dataclass(frozen=True, slots=True)
class Variant:
    """One method of a sweep.

    Attributes:
        family: What the methods of a sweep have in common.
        value: What they differ in.
    """

    method: str
    family: str
    value: str


def shares(methods: Sequence[str]) -> list[Variant]:
    """Return methods that compute tokens again, with how many: `cacheblend(r=0.3)`, `epic(32)`."""
    found: list[Variant] = []
    for method in methods:
        call = _parsed(method)
        names = {"cacheblend": "r", "a3": "r", "random": "r", "epic": "k"}
        if call is None or call.name not in names:
            continue
        key = names[call.name]
        default = "16" if key == "k" else "0.15"
        value = call.parameters.get(key) or (call.values[0] if call.values else default)
        rest = [f"{name}={given}" for name, given in call.parameters.items() if name != key] + [*call.values[1:]]
        found.append(Variant(method, f"{call.name}({', '.join(rest)})" if rest else call.name, value))
    return _swept(found)


def codecs(methods: Sequence[str]) -> list[Variant]:
    """Return methods that differ in the codec of what they read: `int8(kvlink)`, `kvlink(codec=int8)`, `kvlink`."""
    found: list[Variant] = []
    for method in methods:
        call = _parsed(method)
        if call is None:
            continue
        if call.name in WRAPPERS:
            size = call.parameters.get("size") or (call.values[0] if len(call.values) > 1 else "50")
            inner = call.parameters.get("method") or (call.values[-1] if call.values else "concat_reencoded")
            found.append(Variant(method, inner.strip(), call.name if call.name != "prune" else f"{size} %"))
        elif "codec" in call.parameters:
            rest = [f"{name}={given}" for name, given in call.parameters.items() if name != "codec"]
            found.append(
                Variant(method, f"{call.name}({','.join(rest)})" if rest else call.name, call.parameters["codec"])
            )
        else:
            found.append(Variant(method, method, "raw"))
    return _swept(found)


def base_name(task: str) -> str:
    """Return a task's name without parameters; a path stays as it is."""
    return task.partition("(")[0].strip()


def _swept(found: Sequence[Variant]) -> list[Variant]:
    """Leave out families of one."""
    families = [one.family for one in found]
    return [one for one in found if families.count(one.family) > 1]


def _parsed(method: str) -> Call | None:
    try:
        return parse(method)
    except InputError:
        return None
