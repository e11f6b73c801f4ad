"""How many link tokens, or rows, are enough: more of them, until the held-out divergence hardly falls any more."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvlink.core.errors import InputError

GAIN = 0.02
"""Share by which one step more has to lower the held-out divergence to be worth its cost."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was tried, in order, and what to take.

    Attributes:
        tried: Number of link tokens or rows, and held-out divergence.
        advice: The number to take.
        reason: Why, in words.
    """

    tried: tuple[tuple[int, float], ...]
    advice: int
    reason: str


def parse_counts(
    text: str, *, option: str = "--counts", what: str = "numbers of link tokens such as 4,6,8"
) -> list[int]:
    """Return `4,6,8` as numbers, ascending.

    Raises:
        InputError: It has another form.
    """
    try:
        counts = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise InputError(f"{option} {text!r} is no list of {what}")
    return counts


def sweep(
    counts: Iterable[int],
    run: Callable[[int], float],
    *,
    of: str = "links",
    gain: float = GAIN,
    whole: bool = False,
) -> Sweep:
    """Train with each number in turn, and stop when one more step gains less than `gain` of the divergence.

    Args:
        run: Trains with this many link tokens, or rows, and returns the held-out divergence.
        of: What is counted.
        whole: Try all of them, whatever they gain.

    Raises:
        InputError: There are no numbers.
    """
    tried: list[tuple[int, float]] = []
    enough: Sweep | None = None
    for count in counts:
        tried.append((count, run(count)))
        if len(tried) > 1 and enough is None:
            (best, before), (_, now) = tried[-2:]
            if now > before * (1 - gain):
                reason = f"{count} {of} come to {now:.4f}, {best} to {before:.4f}: less than {gain:.0%} better"
                enough = Sweep(tuple(tried), best, reason)
        if enough and not whole:
            return enough
    if not tried:
        raise InputError(f"no number of {of} is given to compare")
    if enough:
        return Sweep(tuple(tried), enough.advice, enough.reason)
    best, found = tried[-1]
    reason = f"{best} {of} come to {found:.4f}, and " + (
        f"each step gained {gain:.0%} or more: more of them may gain, too"
        if len(tried) > 1
        else "nothing else was tried"
    )
    return Sweep(tuple(tried), best, reason)
