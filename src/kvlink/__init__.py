"""KVLink: compute each document's keys and values once, reuse them in any prompt, in any order, at any place.

    from kvlink import Engine

    with Engine.from_pretrained("demo", store="handbook.kv") as engine:
        answer = engine.generate(["The capital of France is Paris."], "What is the capital of France?")

Heavy libraries are imported when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlink.core.document import Document
    from kvlink.core.errors import (
        BundleRefused,
        Cancelled,
        ContextOverflow,
        DamagedObject,
        DeadlineExceeded,
        DeviceBusy,
        DeviceOverflow,
        EmptyQuestion,
        InputError,
        KVLinkError,
        KVLinkWarning,
        ModelError,
        ModelRefused,
        QueueFull,
        StoreError,
        StoreFull,
        StoreUnusable,
        TextUnavailable,
        TrainingDiverged,
    )
    from kvlink.engine.assembled import Assembled
    from kvlink.engine.chat import Chat
    from kvlink.engine.engine import Engine
    from kvlink.engine.job import Job
    from kvlink.engine.library import Library
    from kvlink.engine.limits import Limits
    from kvlink.engine.sampling import SamplingParams
    from kvlink.engine.stream import Stream
    from kvlink.engine.usage import Answer, DocumentUsage, Timings, Usage
    from kvlink.models.bundle import Bundle
    from kvlink.store.disk import DiskStore
    from kvlink.store.memory import MemoryStore

_HOMES = {
    "Answer": "engine.usage",
    "Assembled": "engine.assembled",
    "Bundle": "models.bundle",
    "BundleRefused": "core.errors",
    "Cancelled": "core.errors",
    "Chat": "engine.chat",
    "ContextOverflow": "core.errors",
    "DamagedObject": "core.errors",
    "DeadlineExceeded": "core.errors",
    "DeviceBusy": "core.errors",
    "DeviceOverflow": "core.errors",
    "DiskStore": "store.disk",
    "Document": "core.document",
    "DocumentUsage": "engine.usage",
    "EmptyQuestion": "core.errors",
    "Engine": "engine.engine",
    "InputError": "core.errors",
    "Job": "engine.job",
    "KVLinkError": "core.errors",
    "KVLinkWarning": "core.errors",
    "Library": "engine.library",
    "Limits": "engine.limits",
    "MemoryStore": "store.memory",
    "ModelError": "core.errors",
    "ModelRefused": "core.errors",
    "QueueFull": "core.errors",
    "SamplingParams": "engine.sampling",
    "StoreError": "core.errors",
    "StoreFull": "core.errors",
    "StoreUnusable": "core.errors",
    "Stream": "engine.stream",
    "TextUnavailable": "core.errors",
    "Timings": "engine.usage",
    "TrainingDiverged": "core.errors",
    "Usage": "engine.usage",
}

__all__ = [
    "Answer",
    "Assembled",
    "Bundle",
    "BundleRefused",
    "Cancelled",
    "Chat",
    "ContextOverflow",
    "DamagedObject",
    "DeadlineExceeded",
    "DeviceBusy",
    "DeviceOverflow",
    "DiskStore",
    "Document",
    "DocumentUsage",
    "EmptyQuestion",
    "Engine",
    "InputError",
    "Job",
    "KVLinkError",
    "KVLinkWarning",
    "Library",
    "Limits",
    "MemoryStore",
    "ModelError",
    "ModelRefused",
    "QueueFull",
    "SamplingParams",
    "StoreError",
    "StoreFull",
    "StoreUnusable",
    "Stream",
    "TextUnavailable",
    "Timings",
    "TrainingDiverged",
    "Usage",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvlink' has no attribute {name!r}")
    return getattr(import_module(f"kvlink.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
