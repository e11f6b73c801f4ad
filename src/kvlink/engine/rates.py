"""How fast loading and encoding are here, by running estimates; and where encoding is the faster of the two.

Knows no stores, no model and no clock: it is told what was measured.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from kvlink.engine.usage import Source

LEAST = 3
"""Measurements of both sides before one is preferred."""

MEMORY = 0.9
"""Weight of what was known when something new is measured: about the last ten measurements count."""

LOOK_AGAIN = 16
"""Of so many loads that would be too slow one is made, so that a place that has become faster is noticed."""


@dataclass(slots=True)
class Line:
    """Seconds as a straight line over an amount, by least squares in which old measurements fade."""

    count: int = 0
    weight: float = 0.0
    amount: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, amount: int, seconds: float) -> None:
        """Take a measurement in."""
        self.count += 1
        self.weight = MEMORY * self.weight + 1
        self.amount = MEMORY * self.amount + amount
        self.seconds = MEMORY * self.seconds + seconds
        self.squares = MEMORY * self.squares + amount * amount
        self.products = MEMORY * self.products + amount * seconds

    def at(self, amount: int) -> float:
        """Return the seconds for an amount. Neither latency nor rate is ever negative."""
        mean, mean_s = self.amount / self.weight, self.seconds / self.weight
        spread = self.squares / self.weight - mean * mean
        if spread <= 1e-4 * mean * mean:  # all of about one size: latency and rate cannot be told apart
            return mean_s * amount / mean if mean else mean_s
        slope = max(0.0, (self.products / self.weight - mean * mean_s) / spread)
        latency = mean_s - slope * mean
        if latency < 0:
            return self.products / self.squares * amount
        return latency + slope * amount


@final
class Rates:
    """Running estimates of one loader. Every method may be called from any thread."""

    def __init__(self, *, least: int = LEAST) -> None:
        """Know nothing yet.

        Args:
            least: Measurements of a tier, and of encoding, before loading from that tier is ever refused.
        """
        self._least = least
        self._lock = threading.Lock()
        self._loads: dict[Source, Line] = {}
        self._encodes = Line()
        self._refused: Counter[Source] = Counter()

    def loaded(self, source: Source, num_bytes: int, seconds: float) -> None:
        """Note a load, verified and decoded."""
        with self._lock:
            self._loads.setdefault(source, Line()).add(num_bytes, seconds)

    def encoded(self, tokens: int, seconds: float) -> None:
        """Note an encode."""
        with self._lock:
            self._encodes.add(tokens, seconds)

    def load_s(self, source: Source, num_bytes: int) -> float | None:
        """Return how long a load would take, or None while that is not known."""
        with self._lock:
            line = self._loads.get(source)
            return line.at(num_bytes) if line is not None and line.count >= self._least else None

    def longest_s(self, sizes: Sequence[int]) -> float | None:
        """Return how long loads would take one after another from the slowest tier; None while none is known."""
        with self._lock:
            known = [line for line in self._loads.values() if line.count >= self._least]
            return max((sum(map(line.at, sizes), 0.0) for line in known), default=None)

    def encode_s(self, tokens: int) -> float | None:
        """Return how long encoding would take, or None while that is not known."""
        with self._lock:
            return self._encodes.at(tokens) if self._encodes.count >= self._least else None

    def may_refuse(self, num_bytes: int, tokens: int) -> bool:
        """Whether some tier is so slow that it is worth asking from which one a segment would come."""
        with self._lock:
            known = list(self._loads)
        encode_s = self.encode_s(tokens)
        return encode_s is not None and any((self.load_s(source, num_bytes) or 0.0) > encode_s for source in known)

    def refusal(self, source: Source, num_bytes: int, tokens: int) -> str:
        """Return why a segment had better be encoded than loaded, or nothing where it had not.

        Of `LOOK_AGAIN` refusals in a row the last is none: the load is made, and measured.
        """
        load_s, encode_s = self.load_s(source, num_bytes), self.encode_s(tokens)
        if load_s is None or encode_s is None or load_s <= encode_s:
            return ""
        with self._lock:
            self._refused[source] += 1
            if self._refused[source] % LOOK_AGAIN == 0:
                return ""
        return (
            f"loading {num_bytes / 1e6:.3g} MB from {source} takes about {_shown(load_s)}, encoding {_shown(encode_s)}"
        )


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1000:.2g} ms"
