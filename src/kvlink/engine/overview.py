"""What a library holds, as one look at its store found it: rows, counts, and what near-duplicates cost."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from kvlink.core.simhash import near_pairs
from kvlink.engine.record import Listing, Near, Row, Status
from kvlink.store.base import Store


class Overview:
    """Documents and the bytes of their entries. The store is asked about each entry once.

    Args:
        listings: Every document, those of a scope together.
        store: Where the entries are.
    """

    def __init__(self, listings: Sequence[Listing], store: Store) -> None:
        self._listings = listings
        self._sizes = _Sizes(store)

    def rows(self) -> list[Row]:
        """Return one row per document, in the order of the listings."""
        return [self._row(listing) for listing in self._listings]

    def status(self, *, jobs: int, removing: int) -> Status:
        """Return counts, bytes, and near-duplicates with what they cost.

        Args:
            jobs: Documents that wait for their entries.
            removing: Entries that wait to be deleted.
        """
        rows = self.rows()
        states = Counter(row.state for row in rows)
        return Status(
            documents=len(rows),
            tokens=sum(row.tokens for row in rows),
            ready=states["ready"],
            pending=states["pending"],
            jobs=jobs,
            removing=removing,
            bytes=sum(self._sizes[name] for name in {name for one in self._listings for name in one.names}),
            near=tuple(self._near()),
        )

    def _row(self, listing: Listing) -> Row:
        ready = bool(listing.segments) and all(self._sizes[segment.name] for segment in listing.segments)
        return Row(
            listing.id,
            listing.scope,
            tokens=sum(segment.tokens for segment in listing.segments),
            segments=len(listing.segments),
            state="ready" if ready else "pending",
            bytes=sum(map(self._sizes.__getitem__, listing.names)),
        )

    def _near(self) -> list[Near]:
        """Return pairs of one scope that nearly say the same; the smaller of what each has for itself is the cost."""
        found: list[Near] = []
        for _, group in groupby(self._listings, key=lambda listing: listing.scope):
            same = list(group)
            for i, j, bits in near_pairs([listing.simhash for listing in same]):
                one, other = same[i], same[j]
                if one.digest != other.digest:
                    apart = (one.names - other.names, other.names - one.names)
                    cost = min(sum(map(self._sizes.__getitem__, names)) for names in apart)
                    found.append(Near(one.id, other.id, bits, cost))
        return found


class _Sizes(dict[str, int]):
    """Bytes of all objects of a name, asked of the store once."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def __missing__(self, name: str) -> int:
        self[name] = sum(stat.num_bytes for stat in self._store.stat(name).values())
        return self[name]
