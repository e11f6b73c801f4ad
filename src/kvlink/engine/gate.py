"""Which codecs a model's answers bear: verdicts that were measured once and are kept in the store.

A store keeps the first value of a setting for ever. So each verdict has a number, and the last one counts: a new
measurement adds one, and the earlier ones stay readable. Knows no rows and no scores.
"""

from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from kvlink.core.errors import StoreUnusable
from kvlink.store.base import Store
from kvlink.store.codec import CODECS

GATE = 1
"""Changes whenever a codec gives other numbers than before: verdicts under another number do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a measurement said of one codec.

    Attributes:
        passed: Whether `agreement` was at least `threshold`.
        agreement: Share of scored tokens at which the codec gives the same most likely id as raw; mean over rows.
        kl: KL(raw || codec) in nats per token; mean over rows.
        rows, tokens: How many were scored.
        figures: Digest (hex) of the rows.
    """

    passed: bool
    agreement: float
    threshold: float
    kl: float
    rows: int
    tokens: int
    figures: str


def passed_codecs(store: Store, digest: str) -> tuple[str, ...]:
    """Return the lossy codecs whose last verdict for a model is that it passed, the most exact first.

    Args:
        store: Where verdicts are kept.
        digest: Of the model (hex). What holds for one model says nothing of another, a quantised copy included.

    Raises:
        StoreUnusable: The store cannot be read.
    """
    found = ((codec, _last(store, digest, codec)[1]) for codec in CODECS if codec != "raw")
    return tuple(codec for codec, kept in found if isinstance(kept, dict) and kept.get("passed") is True)


def keep_verdict(store: Store, digest: str, codec: str, verdict: Verdict) -> None:
    """Keep a verdict as the last one. What other processes keep at the same time comes before or after it.

    Raises:
        StoreUnusable: The store cannot be written.
    """
    value = asdict(verdict)
    while True:
        number, last = _last(store, digest, codec)
        if last == value or store.keep_setting(_key(digest, codec, number), value) == value:
            return


def last_verdict(store: Store, digest: str, codec: str) -> Verdict | None:
    """Return the verdict that counts, or None where nothing has been measured.

    Raises:
        StoreUnusable: The store cannot be read, or holds no verdict in its place.
    """
    kept = _last(store, digest, codec)[1]
    try:
        return None if kept is None else Verdict(**kept)
    except TypeError as error:
        raise StoreUnusable(f"the verdict on {codec} is none of this version ({error}); calibrate again") from error


def _last(store: Store, digest: str, codec: str) -> tuple[int, Any]:
    """Return the number of the next verdict, and the last one."""
    last: Any = None
    for number in count():
        found = store.setting(_key(digest, codec, number))
        if found is None:
            return number, last
        last = found
    raise AssertionError("numbers do not end")


def _key(digest: str, codec: str, number: int) -> str:
    return f"gate:{GATE}:{digest}:{codec}:{number}"
