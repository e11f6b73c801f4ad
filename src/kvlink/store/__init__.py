"""Encoded objects under (fingerprint, codec), in memory, on disk and in a remote. Knows no models and no requests."""

from kvlink.store.base import JSON, BoundedStore, Lease, ObjectStat, Source, Store, StoreStats
from kvlink.store.claim import Claim
from kvlink.store.codec import CODECS, StoredObject, check_head, encode, open_object
from kvlink.store.disk import DiskStore, GcReport, Verdict
from kvlink.store.memory import MemoryStore
from kvlink.store.opening import host_bytes, open_remote, open_store
from kvlink.store.recompress import RecompressReport
from kvlink.store.recompressing import RecompressingStats, RecompressingStore, under_pressure
from kvlink.store.remote import RemoteStore
from kvlink.store.remote_stats import RemoteStats
from kvlink.store.sealed import Seal, store_key
from kvlink.store.tier import TieredStats, TierStats
from kvlink.store.tiered import TieredStore

__all__ = [
    "CODECS",
    "JSON",
    "BoundedStore",
    "Claim",
    "DiskStore",
    "GcReport",
    "Lease",
    "MemoryStore",
    "ObjectStat",
    "RecompressReport",
    "RecompressingStats",
    "RecompressingStore",
    "RemoteStats",
    "RemoteStore",
    "Seal",
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
    "host_bytes",
    "open_object",
    "open_remote",
    "open_store",
    "store_key",
    "under_pressure",
]
