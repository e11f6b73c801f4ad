"""What a store behind a network counts. Plain values."""

from dataclasses import dataclass

from kvlink.store.base import StoreStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats(StoreStats):
    """What happened since the store was opened. Bytes are not counted: `used_bytes` and `budget_bytes` are 0.

    Attributes:
        errors: Calls that failed, after their retry.
        retries: Calls that were made a second time.
        passed_over: Calls that were not made, because the breaker was open.
        not_kept: Objects that were put and are not there.
        is_open: Whether the breaker is open, so that gets are misses and puts are refused.
        reason: What failed last; empty if nothing has.
    """

    errors: int
    retries: int
    passed_over: int
    not_kept: int
    is_open: bool
    reason: str
