"""How many link tokens are enough: more of them, until the held-out divergence hardly falls any more."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvlink.core.errors import InputError

GAIN = 0.02
"""Share by which two more link tokens have to lower the held-out divergence to be worth their cost."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was tried, in order, and what to take.

    Attributes:
        tried: Number of link tokens and held-out divergence.
        advice: The number to take.
        reason: Why, in words.
    """

    tried: tuple[tuple[int, float], ...]
    advice: int
    reason: str


def parse_counts(text: str) -> list[int]:
    """Return `4,6,8` as numbers, ascending.

    Raises:
        InputError: It has another form.
    """
    try:
        counts = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise InputError(f"--counts {text!r} is no list of numbers of link tokens such as 4,6,8")
    return counts


def sweep(counts: Iterable[int], run: Callable[[int], float], *, gain: float = GAIN) -> Sweep:
    """Train with each number of links in turn, and stop when one more step gains less than `gain` of the divergence.

    Args:
        run: Trains with this many link tokens and returns the held-out divergence.

    Raises:
        InputError: There are no numbers.
    """
    tried: list[tuple[int, float]] = []
    for count in counts:
        tried.append((count, run(count)))
        if len(tried) > 1:
            before, now = tried[-2][1], tried[-1][1]
            if now > before * (1 - gain):
                best = tried[-2][0]
                reason = f"{count} links come to {now:.4f}, {best} to {before:.4f}: less than {gain:.0%} better"
                return Sweep(tuple(tried), best, reason)
    if not tried:
        raise InputError("no number of link tokens is given to compare")
    best, found = tried[-1]
    reason = f"{best} links come to {found:.4f}, and " + (
        f"each step gained {gain:.0%} or more: more of them may gain, too"
        if len(tried) > 1
        else "nothing else was tried"
    )
    return Sweep(tuple(tried), best, reason)
