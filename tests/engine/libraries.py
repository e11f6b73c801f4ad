"""Libraries over tiny engines, texts to edit, and what of them lies in files."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

from engines import engine_of

from kvlink import Document, Engine
from kvlink.core.entry import CacheEntry
from kvlink.core.fingerprint import ids_bytes
from kvlink.engine.library import Library

WORDS = [
    "wind",
    "snow",
    "pass",
    "road",
    "hut",
    "lamp",
    "bread",
    "salt",
    "office",
    "crew",
    "valley",
    "ridge",
    "post",
    "hour",
    "news",
    "air",
]


def text_of(words: int, *, seed: int = 0) -> str:
    """Return a made-up text; every sentence is a paragraph of its own. No two seeds share their words."""
    draw = random.Random(seed)
    vocabulary = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 6))) for _ in range(60)]
    found = [draw.choice(vocabulary) + ("." if place % 12 == 11 else "") for place in range(words)]
    return " ".join(found).replace(". ", ".\n\n")


def edited(text: str, share: float, *, to: str = "XYZ") -> str:
    """Return a text with three characters replaced at a share of its length."""
    at = int(share * len(text))
    return text[:at] + to + text[at + 3 :]


def library_of(folder: Path, *, name: str = "llama", num_links: int = 0) -> Library:
    """Return a library in `folder`, its entries in a store on disk below it."""
    return Library(folder, engine_of(name, store=folder / "entries", num_links=num_links))


def names_of(library: Library, one: str) -> list[str]:
    """Return the fingerprints of a document's segments."""
    engine = library.engine
    segments = engine.prompter.segments(library.get(one).document, cut=engine.cuts_documents)
    return [engine.loader.name(ids) for ids in segments]


def stored(engine: Engine, name: str) -> CacheEntry:
    """Return an entry that is stored bit for bit."""
    with engine.store.get(name, ("raw",)) as lease:  # type: ignore[union-attr]
        return lease.object.decode()


def files_below(*folders: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield all files below some folders, and their bytes."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield path, path.read_bytes()


def traces(engine: Engine, document: Document, *folders: Path) -> list[str]:
    """Return where anything of a document lies: its text (any 16 bytes of it), its ids, its names."""
    text = document.text
    pieces = [text[at : at + 16] for at in range(0, len(text) - 16, 16)]
    parts = {piece.encode(coding) for piece in pieces for coding in ("utf-8", "utf-16-le")}
    for ids in engine.prompter.segments(document, cut=engine.cuts_documents):
        name, some = engine.loader.name(ids), ids[24:36]
        parts |= {name.encode(), bytes.fromhex(name), ids_bytes(some), bytes(ids_bytes(some)[::2])}
        parts |= {separator.join(map(str, some)).encode() for separator in (",", ", ", " ")}
    found = list(files_below(*folders))
    return [str(path) for path, data in found if any(part in data or part in os.fsencode(path) for part in parts)]
