"""`int8` and `int4`: whole numbers of few bits, and 16-bit numbers for each group of 32 or 64 elements.

Unrotated keys are grouped per channel over tokens, since a channel keeps its scale from token to token; values per
token over channels. The last group of an axis is as long as what is left. A group's numbers are rounded outwards
when they become 16-bit, so that the group stays within reach, and its codes are made with the rounded ones: no element
is off by more than half a step, beside the rounding of the entry's own dtype.

`int4` gives a value four bits and a key five, and pays for the fifth with groups of 64 instead of 32: at the same size,
an error of keys moves the answers of SmolLM2 ten times as far as one of values, though it is the smaller of the two.

The 16 bits are those of the entry where it has 16, and bfloat16 otherwise: it knows no overflow where float32 knows
none, and costs 2 % (int8) and 0.5 % (int4) of the error that float16 gives on SmolLM2. Codes are stored as they are:
zstd made such objects 3.3 and 3.5 % smaller, which does not pay for packing at a third of the speed, a dependency, and
sizes that no header tells beforehand.

Source: Liu et al. 2024 (KIVI): keys per channel, values per token. hqq, optimum-quanto and torchao turn weights and
running caches into containers of their own; files need tails of any length, a bound for each element, and bytes that
stay as they are from release to release.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, final

import torch
from torch import Tensor

from kvlink.core.entry import CacheEntry
from kvlink.store.codecs.base import Codec, fresh_tensor, geometry_of
from kvlink.store.header import Geometry, TensorPlan

LIMIT = 2.0**120
"""The greatest number that is taken: times any code it is still a float32, and so is what comes of any file."""

_AXES = {"key": 2, "value": 3}
"""Along which axis of [layers, kv_heads, tokens, head_dim] the elements of a group lie."""

_PART = 2**18
"""Elements that are worked on at a time: as float32 they stay within a processor's caches."""


class Quantised(Codec):
    """Codes and, per group, 16-bit numbers that say what the codes mean. Works on a few layers at a time."""

    numbers: ClassVar[tuple[str, ...]]
    """What is kept of a group; the first is its scale."""

    group: ClassVar[int]
    """Elements that share a scale."""

    greatest: ClassVar[Mapping[str, int]]
    """The greatest code of a key, and of a value."""

    @abstractmethod
    def planes(self, of: str, tokens: int, channels: int) -> dict[str, TensorPlan]:
        """Return what holds the codes of one layer and head of keys or values, by name: their two last axes."""

    @abstractmethod
    def measure(self, low: Tensor, high: Tensor, greatest: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the numbers of groups, of a 16-bit dtype, from their least and greatest elements in float32."""

    @abstractmethod
    def quantise(self, block: Tensor, greatest: int, *numbers: Tensor) -> None:
        """Turn elements into codes, still in float32, in place."""

    @abstractmethod
    def restore(self, block: Tensor, *numbers: Tensor) -> None:
        """Turn codes in float32 into elements, in place."""

    @abstractmethod
    def squeeze(self, codes: Tensor, *planes: Tensor) -> None:
        """Write codes in float32 the way they are stored."""

    @abstractmethod
    def spread(self, out: Tensor, *planes: Tensor) -> None:
        """Write stored codes as float32."""

    def plan(self, geometry: Geometry, dtype: torch.dtype) -> dict[str, TensorPlan]:
        """Return the groups' numbers, then the codes: first of keys, then of values."""
        rows = (geometry.layers, geometry.kv_heads)
        key_groups = (*rows, self._groups(geometry.tokens), geometry.head_dim)
        value_groups = (*rows, geometry.tokens, self._groups(geometry.value_dim))
        small = _sixteen_bits(dtype)
        plans = {f"key_{name}": TensorPlan(small, key_groups) for name in self.numbers}
        plans |= {f"value_{name}": TensorPlan(small, value_groups) for name in self.numbers}
        for of, channels in (("key", geometry.head_dim), ("value", geometry.value_dim)):
            for name, plane in self.planes(of, geometry.tokens, channels).items():
                plans[f"{of}_{name}"] = TensorPlan(plane.dtype, (*rows, *plane.shape))
        return plans

    def pack(self, entry: CacheEntry) -> dict[str, Tensor]:
        """Return the groups' numbers and the codes."""
        dtype, device, numbers = entry.keys.dtype, entry.keys.device, len(self.numbers)
        plans = self.plan(geometry_of(entry), dtype)
        packed = {name: torch.empty(plan.shape, dtype=plan.dtype, device=device) for name, plan in plans.items()}
        for (of, axis), tensor in zip(_AXES.items(), (entry.keys, entry.values), strict=True):
            for elements, *stored in _in_parts(tensor[0].numel(), tensor, *self._stored(packed, of)):
                work = elements.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
                for block, start in _blocks(work, axis, self.group):
                    low, high = block.amin(axis + 1, keepdim=True), block.amax(axis + 1, keepdim=True)
                    _require_numbers(of, low, high)
                    found = self.measure(low, high, self.greatest[of], _sixteen_bits(dtype))
                    self.quantise(block, self.greatest[of], *(number.float() for number in found))
                    for plane, number in zip(stored[:numbers], found, strict=True):
                        plane.narrow(axis, start, block.shape[axis]).copy_(number.squeeze(axis + 1))
                self.squeeze(work, *stored[numbers:])
        return packed

    def unpack(
        self, tensors: Mapping[str, Tensor], *, geometry: Geometry, dtype: torch.dtype, token_ids: tuple[int, ...]
    ) -> CacheEntry:
        """Return an entry of `dtype`; every element of it is finite."""
        found: list[Tensor] = []
        count = len(self.numbers)
        for (of, axis), channels in zip(_AXES.items(), (geometry.head_dim, geometry.value_dim), strict=True):
            planes = self._stored(tensors, of)
            shape = (geometry.layers, geometry.kv_heads, geometry.tokens, channels)
            found.append(fresh_tensor(shape, dtype=dtype, device=planes[-1].device))
            for elements, *stored in _in_parts(found[-1][0].numel(), found[-1], *planes):
                work = elements if dtype == torch.float32 else torch.empty_like(elements, dtype=torch.float32)
                self.spread(work, *stored[count:])
                numbers = [number.float() for number in stored[:count]]
                for block, start in _blocks(work, axis, self.group):
                    self.restore(
                        block,
                        *(number.narrow(axis, start, block.shape[axis]).unsqueeze(axis + 1) for number in numbers),
                    )
                if dtype == torch.float16:  # the last step may lead beyond what it holds
                    work.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
                if work is not elements:
                    elements.copy_(work)
        return CacheEntry(found[0], found[1], token_ids)

    def check(self, tensors: Mapping[str, Tensor], geometry: Geometry) -> None:
        """Refuse numbers of groups that are not finite or beyond `LIMIT`, and scales that are not positive."""
        for of in _AXES:
            for name in self.numbers:
                numbers = tensors[f"{of}_{name}"].float()
                if not (numbers.abs() <= LIMIT).all() or (name == "scales" and not (numbers > 0).all()):
                    raise ValueError(f"its {of}_{name} hold numbers that no entry gives")

    def _stored(self, tensors: Mapping[str, Tensor], of: str) -> list[Tensor]:
        """Return what is stored of keys or values: the groups' numbers, then the codes."""
        names = (*self.numbers, *self.planes(of, 1, 1))
        return [tensors[f"{of}_{name}"] for name in names]

    def _groups(self, size: int) -> int:
        return -(-size // self.group)


@final
class Int8(Quantised):
    """Eight bits from -127 to 127, times a scale. Groups of one 16-bit number, normal or zero, come back exactly."""

    numbers = ("scales",)
    group = 32
    greatest = MappingProxyType({"key": 127, "value": 127})

    def planes(self, of: str, tokens: int, channels: int) -> dict[str, TensorPlan]:
        """One byte each."""
        return {"codes": TensorPlan(torch.int8, (tokens, channels))}

    def measure(self, low: Tensor, high: Tensor, greatest: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return scales."""
        farthest = torch.maximum(-low, high)
        constant = (low == high) & (farthest == farthest.to(dtype))
        return (_scales(torch.where(constant, farthest, farthest / greatest), dtype),)

    def quantise(self, block: Tensor, greatest: int, *numbers: Tensor) -> None:
        """Divide and round."""
        block.div_(numbers[0]).round_().clamp_(-greatest, greatest)

    def restore(self, block: Tensor, *numbers: Tensor) -> None:
        """Multiply."""
        block.mul_(numbers[0])

    def squeeze(self, codes: Tensor, *planes: Tensor) -> None:
        """Write bytes."""
        planes[0].copy_(codes)

    def spread(self, out: Tensor, *planes: Tensor) -> None:
        """Read bytes."""
        out.copy_(planes[0])


@final
class Int4(Quantised):
    """Four bits of a value, five of a key, times a scale, above a zero point: the low end of the group.

    Groups of one 16-bit number are exact. A byte of `codes` holds the low four bits of two channels: one of the first
    half in its low bits, one of the second half in its high bits. Where channels are odd in number, the first half is
    the longer one and the last high bits are zero. A byte of `fifths` holds the fifth bit of a channel in eight tokens:
    bit `b` of row `r` is that of token `r + b * rows`; bits of no token are zero.
    """

    numbers = ("scales", "lows")
    group = 64
    greatest = MappingProxyType({"key": 31, "value": 15})

    def planes(self, of: str, tokens: int, channels: int) -> dict[str, TensorPlan]:
        """Two low halves per byte; of keys eight fifth bits per byte."""
        found = {"codes": TensorPlan(torch.uint8, (tokens, (channels + 1) // 2))}
        return found | {"fifths": TensorPlan(torch.uint8, ((tokens + 7) // 8, channels))} if of == "key" else found

    def measure(self, low: Tensor, high: Tensor, greatest: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return scales and low ends."""
        lows = -_rounded_up(-low, dtype)
        return _scales((high - lows.float()) / greatest, dtype), lows

    def quantise(self, block: Tensor, greatest: int, *numbers: Tensor) -> None:
        """Subtract, divide and round."""
        block.sub_(numbers[1]).div_(numbers[0]).round_().clamp_(0, greatest)

    def restore(self, block: Tensor, *numbers: Tensor) -> None:
        """Multiply and add."""
        block.mul_(numbers[0]).add_(numbers[1])

    def squeeze(self, codes: Tensor, *planes: Tensor) -> None:
        """Write two low halves per byte, and eight fifth bits per byte."""
        whole = codes.to(torch.uint8)
        half = planes[0].shape[-1]
        low = whole & 15
        planes[0].copy_(low[..., :half])
        second = low[..., half:]
        planes[0][..., : second.shape[-1]] |= second << 4
        for fifths in planes[1:]:
            fifths.zero_()
            for bit, tokens in enumerate((whole >> 4).split(fifths.shape[-2], dim=-2)):
                fifths[..., : tokens.shape[-2], :] |= tokens << bit

    def spread(self, out: Tensor, *planes: Tensor) -> None:
        """Read two low halves per byte, and eight fifth bits per byte."""
        half = planes[0].shape[-1]
        whole = torch.empty_like(out, dtype=torch.uint8)
        whole[..., :half] = planes[0] & 15
        whole[..., half:] = (planes[0] >> 4)[..., : out.shape[-1] - half]
        for fifths in planes[1:]:
            for bit, tokens in enumerate(whole.split(fifths.shape[-2], dim=-2)):
                tokens.bitwise_or_((fifths[..., : tokens.shape[-2], :] >> bit & 1) << 4)
        out.copy_(whole)


def _sixteen_bits(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the groups' numbers in entries of `dtype`."""
    return dtype if dtype.itemsize == torch.bfloat16.itemsize else torch.bfloat16


def _in_parts(per_layer: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same layers of all tensors, as many at a time as have `_PART` elements of an entry, at least one."""
    yield from zip(*(tensor.split(max(1, _PART // per_layer)) for tensor in tensors), strict=True)


def _blocks(tensor: Tensor, axis: int, group: int) -> Iterator[tuple[Tensor, int]]:
    """Yield views whose `axis` is split into groups and their elements, and the number of their first group.

    The whole groups come first, then the shorter last one, if there is one.
    """
    size = tensor.shape[axis]
    whole = size // group
    if whole:
        yield tensor.narrow(axis, 0, whole * group).unflatten(axis, (whole, group)), 0
    if size % group:
        yield tensor.narrow(axis, whole * group, size % group).unsqueeze(axis), whole


def _require_numbers(of: str, low: Tensor, high: Tensor) -> None:
    """Refuse what has no place on any scale: NaN (which either extreme shows), infinities, numbers beyond `LIMIT`."""
    if not ((low >= -LIMIT) & (high <= LIMIT)).all():
        raise ValueError(
            f"codes have a place for numbers up to {LIMIT:.2g}, but {of}s reach from {low.min().item():g} to "
            f"{high.max().item():g}; take raw, which holds any"
        )


def _scales(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales of `dtype` that are no smaller than the exact ones, and never zero.

    The least is the smallest one that is still a normal float32: processors may take a smaller one for zero.
    """
    least = 2.0**-24 if dtype == torch.float16 else 2.0**-126
    return _rounded_up(exact, dtype).clamp_min(least)


def _rounded_up(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the least numbers of a 16-bit dtype that are not below float32 ones."""
    nearest = exact.to(dtype)
    bits = nearest.view(torch.int16)
    # One step away from zero is one more in the bits, sign aside: towards it for negative numbers.
    above = torch.where(nearest > 0, bits + 1, torch.where(nearest < 0, bits - 1, torch.ones_like(bits)))
    return torch.where(nearest.float() < exact, above, bits).view(dtype)
