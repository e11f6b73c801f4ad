"""Codecs by name: how an entry's numbers lie in an object. Each says in its module what it loses."""

from collections.abc import Mapping
from types import MappingProxyType

from kvlink.store.codecs.base import Codec
from kvlink.store.codecs.half import Half
from kvlink.store.codecs.pruned import Pruned
from kvlink.store.codecs.quantised import Int4, Int8
from kvlink.store.codecs.raw import Raw

__all__ = ["CODECS", "RAW", "Codec", "codec_named"]

RAW = "raw"
"""The codec that holds any entry, bit for bit."""

CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        RAW: Raw(),
        "half": Half(),
        "int8": Int8(),
        "int4": Int4(),
        "pruned75": Pruned(75),
        "pruned50": Pruned(50),
        "pruned25": Pruned(25),
    }
)
"""Every codec that this version reads and writes, by name; the most exact first, those that leave tokens out last."""


def codec_named(codec: str) -> Codec:
    """Return the codec. Guards paths, too: no other name may become part of one.

    Raises:
        ValueError: There is no such codec.
    """
    if codec not in CODECS:
        raise ValueError(f"there is no codec {codec!r}; known are {', '.join(CODECS)}")
    return CODECS[codec]
