"""Entries on their way to a GPU, through pinned memory and on a stream of their own, beside what the model computes."""

from dataclasses import replace
from typing import final

import torch

from kvlink.core.entry import CacheEntry


@final
class Uploader:
    """Copies entries to one CUDA device. `upload` belongs to a loading thread, `received` to the one of the model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def upload(self, entry: CacheEntry) -> CacheEntry:
        """Return the entry on the device, once its copy has ended."""
        with torch.cuda.stream(self._stream):
            pinned = [tensor.contiguous().pin_memory() for tensor in (entry.keys, entry.values)]
            keys, values = (tensor.to(self._device, non_blocking=True) for tensor in pinned)
        self._stream.synchronize()  # the pinned memory is let go of after this
        return replace(entry, keys=keys, values=values)

    def received(self, entry: CacheEntry) -> None:
        """Say that the current stream reads an entry, so that its memory is not handed out again before that ends."""
        for tensor in (entry.keys, entry.values):
            tensor.record_stream(torch.cuda.current_stream(self._device))
