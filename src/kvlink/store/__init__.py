"""Encoded objects under (fingerprint, codec), in memory, on disk and in a remote. Knows no models and no requests."""

from kvlink.store.base import JSON, Lease, ObjectStat, Source, Store, StoreStats
from kvlink.store.codec import CODECS, StoredObject, check_head, encode, open_object
from kvlink.store.disk import DiskStore, GcReport, Verdict
from kvlink.store.memory import MemoryStore
from kvlink.store.remote import Claim, RemoteStats, RemoteStore, open_remote
from kvlink.store.tiered import TieredStats, TieredStore, TierStats

__all__ = [
    "CODECS",
    "JSON",
    "Claim",
    "DiskStore",
    "GcReport",
    "Lease",
    "MemoryStore",
    "ObjectStat",
    "RemoteStats",
    "RemoteStore",
    "Source",
    "Store",
    "StoreStats",
    "StoredObject",
    "TierStats",
    "TieredStats",
    "TieredStore",
    "Verdict",
    "check_head",
    "encode",
    "open_object",
    "open_remote",
]
