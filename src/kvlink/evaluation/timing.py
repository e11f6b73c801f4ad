"""Timing side by side: arms alternate (A B A B ...), every sample is kept, medians and quartiles are shown."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of one arm, with their parts where the arm knows them."""

    seconds: list[float] = field(default_factory=list)
    splits: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Return the median in seconds."""
        return float(np.median(self.seconds))

    def to_json(self) -> dict[str, Any]:
        """Return median, quartiles, samples and the medians of the parts."""
        q1, median, q3 = (float(q) for q in np.percentile(self.seconds, [25, 50, 75]))
        names = self.splits[0] if self.splits else {}
        split = {name: float(np.median([parts[name] for parts in self.splits])) for name in names}
        return {"median_s": median, "q1_s": q1, "q3_s": q3, "samples_s": self.seconds, "split_s": split}


Arm = Callable[[], tuple[float, Mapping[str, float]] | None]


def alternate(
    arms: Mapping[str, Arm],
    *,
    repeats: int,
    warmup: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Run all arms in turn, `warmup` rounds without counting and `repeats` rounds with.

    Args:
        arms: What to run; an arm may return its own (seconds, parts), otherwise its wall time counts.
        progress: Called after each run.
    """
    found = {name: Samples() for name in arms}
    for round_ in range(warmup + repeats):
        for name, arm in arms.items():
            start = perf_counter()
            own = arm()
            seconds = perf_counter() - start
            if round_ >= warmup:
                found[name].seconds.append(own[0] if own else seconds)
                if own:
                    found[name].splits.append(own[1])
            progress()
    return found
