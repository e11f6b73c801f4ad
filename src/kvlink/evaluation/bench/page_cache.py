"""The system's page cache: asked to forget files, and asked what it still holds of them. Linux alone."""

import ctypes
import mmap
import os
from pathlib import Path


def drop_page_cache(folder: Path) -> None:
    """Ask the system to forget the contents of all files below a folder, so that they are read from the disk."""
    for file in folder.rglob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def cached_share(folder: Path) -> float | None:
    """Return which share of the files below a folder lies in the page cache; None where the system does not say."""
    held = pages = 0
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            count = -(-len(mapped) // mmap.PAGESIZE)
            found = (ctypes.c_ubyte * count)()
            start = ctypes.c_char.from_buffer(mapped)
            refused = ctypes.CDLL(None).mincore(
                ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), found
            )
            del start  # a map with views of it cannot be closed
            if refused:
                return None
            held, pages = held + sum(page & 1 for page in found), pages + count
    return held / pages if pages else None
