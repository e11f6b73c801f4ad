"""From settings to what is served: an engine, its library, its journal and its limits, closed in the reverse order.

Settings are the options of `kvlink serve` by name, but for its address: a file, a command line and a cluster's
configuration say the same things with the same words.
"""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from kvlink.core.errors import InputError
from kvlink.engine.engine import Engine
from kvlink.engine.library import Library
from kvlink.engine.limits import Limits
from kvlink.engine.schema import ENTRIES, claim
from kvlink.server.auth import Keys
from kvlink.server.served import MAX_NEW_TOKENS, Served
from kvlink.server.shadow import Shadow
from kvlink.server.traces import exporting
from kvlink.store.address import is_address
from kvlink.store.disk import DiskStore
from kvlink.store.journal import Journal
from kvlink.store.opening import StoreLike
from kvlink.store.sealed import store_key

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `kvlink serve` is told, with its defaults; the page of settings says what each means."""

    model: str = "demo"
    library: Path | None = None
    journal: str | None = None
    store: str | None = None
    remote: str | None = None
    dtype: str | None = None
    budget: int | float = 20
    links: str = "auto"
    foreign_links: bool = False
    name: str | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    deadline: int | float = 600
    elements: bool = False
    max_prompt_tokens: int | None = None
    max_body: int = 16
    shadow_rate: int | float = 0
    shadow_agreement: int | float = 0
    traces: bool = False
    max_running: int = 64
    max_queue: int = 1024
    prefill_rows: int = 64
    request_memory: int | float = 1
    device_memory: int | float | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Settings":
        """Return settings from names and values.

        Raises:
            InputError: A name is none of them.
        """
        known = {field.name for field in fields(cls)}
        if unknown := given.keys() - known:
            raise InputError(f"there is no setting {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
        found = dict(given)
        if found.get("library") is not None:
            found["library"] = Path(found["library"])
        return cls(**found)

    @property
    def limits(self) -> Limits:
        """How much goes on at once."""
        return Limits(
            max_running=self.max_running,
            max_queue=self.max_queue,
            prefill_rows=self.prefill_rows,
            own_bytes=int(self.request_memory * _GIB),
        )

    @property
    def device_bytes(self) -> int | None:
        """What documents and known beginnings may take on the device."""
        return None if self.device_memory is None else int(self.device_memory * _GIB)

    @property
    def entries(self) -> str | None:
        """Where the store is: in the library, if there is one and no other is named."""
        return str(self.library / ENTRIES) if self.library is not None and self.store is None else self.store


def engine_of(settings: Settings) -> Engine:
    """Load the model and open the store, which is in memory where none is named."""
    secret, key = os.environ.get("KVLINK_SECRET"), store_key()
    places: list[Any] = []
    if settings.entries is not None and is_address(settings.entries):
        places.append(settings.entries)
    elif settings.entries is not None:
        budget = int(settings.budget * 1e9)
        kept = secret.encode() if secret else None
        places.append(DiskStore(settings.entries, budget_bytes=budget, secret=kept, store_key=key))
    if settings.remote is not None:
        places.append(settings.remote)
    store: StoreLike = places[0] if len(places) == 1 else places or None
    return Engine.from_pretrained(
        settings.model,
        store=store,
        dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
        secret=secret.encode() if secret else None,
        store_key=key,
        links=None if settings.links == "none" else settings.links,
        foreign_links=settings.foreign_links,
        device_bytes=settings.device_bytes,
        limits=settings.limits,
    )


@contextmanager
def opened(settings: Settings, *, keys: Keys, engine_of: Callable[[Settings], Engine] = engine_of) -> Generator[Served]:
    """Open all that is served, until the block is left.

    Args:
        engine_of: Loads the model.

    Raises:
        InputError: A journal is named, and no library.
        StoreUnusable: A place cannot be used.
    """
    if settings.journal is not None and settings.library is None:
        raise InputError("a journal holds texts of a library: name its folder, too (--library DIR)")
    with ExitStack() as opening:
        if settings.library is not None:
            claim(settings.library)  # a foreign folder is refused before a store is made in it
        engine = opening.enter_context(engine_of(settings))
        library = None if settings.library is None else opening.enter_context(Library(settings.library, engine))
        journal = None
        if settings.journal is not None:
            journal = opening.enter_context(closing(Journal(settings.journal, store_key=store_key())))
        yield Served(
            engine=engine,
            library=library,
            journal=journal,
            model=settings.name or Path(settings.model).name,
            max_new_tokens=settings.max_new_tokens,
            deadline_s=settings.deadline,
            max_bytes=settings.max_body << 20,
            tenants=keys.tenants,
            elements=settings.elements,
            max_prompt_tokens=settings.max_prompt_tokens,
            shadow=Shadow(rate=settings.shadow_rate, least_agreement=settings.shadow_agreement)
            if settings.shadow_rate
            else None,
            traces=exporting() if settings.traces else None,
        )
