"""Encoded objects under (fingerprint, codec), in memory and on disk. Knows no models, requests or networks."""

from kvlink.store.base import JSON, Lease, ObjectStat, Source, Store, StoreStats
from kvlink.store.codec import CODECS, StoredObject, check_head, encode, open_object
from kvlink.store.disk import DiskStore, GcReport, Verdict
from kvlink.store.memory import MemoryStore

__all__ = [
    "CODECS",
    "JSON",
    "DiskStore",
    "GcReport",
    "Lease",
    "MemoryStore",
    "ObjectStat",
    "Source",
    "Store",
    "StoreStats",
    "StoredObject",
    "Verdict",
    "check_head",
    "encode",
    "open_object",
]
