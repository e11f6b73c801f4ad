"""What codecs lose is bounded by what they say, and what they cannot hold they refuse."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from specimens import IDENTITY, entry
from torch import Tensor

from kvlink.core.entry import CacheEntry, same_bits
from kvlink.core.fingerprint import fingerprint
from kvlink.store import CODECS, encode, open_object
from kvlink.store.codecs import quantised
from kvlink.store.codecs.base import geometry_of
from kvlink.store.codecs.quantised import LIMIT
from kvlink.store.header import Geometry

QUANTISED = ("int8", "int4")
LOSSY = ("half", *QUANTISED)
DTYPES = ("bfloat16", "float16", "float32", "float64")
LEVELS = {"int8": {"key": 127, "value": 127}, "int4": {"key": 31, "value": 15}}
GROUP = {"int8": 32, "int4": 64}
AXES = {"key": 2, "value": 3}


def packed_and_read(codec: str, made: CacheEntry) -> tuple[dict[str, Tensor], CacheEntry]:
    packed = CODECS[codec].pack(made)
    CODECS[codec].check(packed, geometry_of(made))
    plans = CODECS[codec].plan(geometry_of(made), made.keys.dtype)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in packed.items()} == {
        name: (plan.dtype, plan.shape) for name, plan in plans.items()
    }
    read = CODECS[codec].unpack(packed, geometry=geometry_of(made), dtype=made.keys.dtype, token_ids=made.token_ids)
    return packed, read


def through(codec: str, made: CacheEntry) -> CacheEntry:
    return packed_and_read(codec, made)[1]


def entry_like(keys: Tensor, values: Tensor | None = None) -> CacheEntry:
    return CacheEntry(keys, keys if values is None else values, tuple(range(keys.shape[2])))


def per_element(codec: str, numbers: Tensor, like: Tensor, of: str) -> Tensor:
    """Give each element the number of its group."""
    axis = AXES[of]
    return numbers.double().repeat_interleave(GROUP[codec], dim=axis).narrow(axis, 0, like.shape[axis])


def excess(codec: str, packed: dict[str, Tensor], before: Tensor, after: Tensor, of: str) -> float:
    """By how much the worst element is off by more than half a step and rounding; below zero all are within.

    Rounding is that of the entry's dtype, and of a few float32 operations on numbers as large as the group's.
    """
    exact = before.double()
    step = per_element(codec, packed[f"{of}_scales"], before, of)
    info = torch.finfo(before.dtype)
    reach = exact.abs() + LEVELS[codec][of] * step
    if codec == "int4":
        reach += per_element(codec, packed[f"{of}_lows"], before, of).abs()
    slack = info.eps * exact.abs() + 2.0**-21 * reach + info.smallest_normal * info.eps + 2.0**-148
    # What is rounded to the entry's dtype is the decoded number, which half a step may take beyond the exact one.
    return ((after.double() - exact).abs() - step / 2 * (1 + info.eps) - slack).max().item()


@st.composite
def entries(draw: st.DrawFn) -> CacheEntry:
    """Entries of any sizes and magnitudes: offsets far from zero, tiny and huge groups, some of them constant."""
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    sizes = st.sampled_from([1, 2, 3, 31, 32, 33, 63, 64, 65]) | st.integers(1, 80)
    tokens, head_dim, value_dim = draw(sizes), draw(sizes), draw(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    least, most = (-26, 12) if dtype == torch.float16 else (-150, 116)

    def numbers(width: int) -> Tensor:
        magnitude, offset = draw(st.integers(least, most)), draw(st.integers(least, most))
        shape = (layers, tokens, heads, width)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-6, 6)
        spread = torch.randint(0, 3, (layers, 1, heads, width), generator=generator)  # some channels are constant
        found = noise * spread * 2.0**magnitude + draw(st.sampled_from([0, 1, -1])) * 2.0**offset
        return found.to(dtype).transpose(1, 2)

    return CacheEntry(numbers(head_dim), numbers(value_dim), tuple(range(tokens)))


# --- how much is lost -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", QUANTISED)
@given(entries())
@example(entry_like(torch.full((1, 1, 1, 1), 65504.0, dtype=torch.float16)))
@example(entry_like(torch.tensor([-LIMIT, LIMIT, 1.0]).view(1, 1, 1, 3)))
@example(entry_like(torch.tensor([0.0, 1e-45, -1e-45, 1e-38]).view(1, 1, 2, 2)))
@settings(max_examples=60, deadline=None)
def test_no_element_is_off_by_more_than_half_a_step(codec: str, made: CacheEntry) -> None:
    packed, read = packed_and_read(codec, made)
    for of, before, after in (("key", made.keys, read.keys), ("value", made.values, read.values)):
        assert after.dtype == before.dtype
        assert after.isfinite().all()
        assert excess(codec, packed, before, after, of) <= 0
    assert read.token_ids == made.token_ids


@pytest.mark.parametrize("codec", QUANTISED)
def test_the_bound_of_half_a_step_notices_a_code_that_is_off_by_one(codec: str) -> None:
    keys = torch.randn(2, 2, 70, 33, generator=torch.Generator().manual_seed(0))
    made = entry_like(keys)
    packed, read = packed_and_read(codec, made)
    nearest = (read.keys - keys).abs() / per_element(codec, packed["key_scales"], keys, "key")
    assert 0.49 < nearest.max() <= 0.501
    packed["key_codes"].view(torch.uint8)[1, 1, 69, 5] ^= 1 if codec == "int8" else 16
    other = CODECS[codec].unpack(packed, geometry=geometry_of(made), dtype=keys.dtype, token_ids=made.token_ids)
    assert excess(codec, packed, keys, other.keys, "key") > 0


@pytest.mark.parametrize("codec", QUANTISED)
def test_keys_share_a_scale_per_channel_and_values_per_token(codec: str) -> None:
    """A channel, or a token, that is a thousand times larger than the others spoils no other."""
    noise = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    channels, tokens = noise.clone(), noise.clone()
    channels[..., 7] *= 1000
    tokens[:, :, 7] *= 1000

    def off(keys: Tensor, values: Tensor) -> list[float]:
        read = through(codec, entry_like(keys, values))
        pairs = ((keys, read.keys), (values, read.values))
        return [((after - before).abs() / before.abs().clamp_min(1)).mean().item() for before, after in pairs]

    fitting, unfitting = off(channels, tokens), off(tokens, channels)
    assert all(10 * good < bad for good, bad in zip(fitting, reversed(unfitting), strict=True))


@given(entries())
@settings(max_examples=60, deadline=None)
def test_half_is_off_by_half_of_the_last_of_eleven_bits_at_most(made: CacheEntry) -> None:
    try:
        read = through("half", made)
    except ValueError:
        assert made.keys.dtype.itemsize == 2 or max(t.abs().max() for t in (made.keys, made.values)) >= 65520
        return
    for before, after in ((made.keys, read.keys), (made.values, read.values)):
        assert after.dtype == before.dtype
        bound = before.double().abs() * 2.0**-11 * (1 + 2.0**-10) + 2.0**-25
        assert ((after.double() - before.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_half_keeps_every_number_of_16_bits(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    keys = every[every.isfinite()].to(dtype).view(1, 1, -1, 4)
    assert same_bits(through("half", entry_like(keys)).keys, keys)


@pytest.mark.parametrize("codec", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**16 - 1), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_groups_of_one_16_bit_number_come_back_exactly(
    codec: str, dtype: str, bits: int, tokens: int, channels: int
) -> None:
    small = torch.float16 if dtype == "float16" else torch.bfloat16
    number = torch.tensor(bits - 2**15, dtype=torch.int16).view(small).double()
    if not 2.0**-24 <= number.abs() <= LIMIT:
        number.zero_()
    keys = number.expand(1, 2, tokens, channels).to(getattr(torch, dtype))
    assert torch.equal(through(codec, entry_like(keys)).keys, keys)


@pytest.mark.parametrize("codec", QUANTISED)
def test_groups_of_two_numbers_need_not_come_back_exactly(codec: str) -> None:
    keys = torch.tensor([0.1, 1.0, 0.37]).view(1, 1, 3, 1)
    assert not torch.equal(through(codec, entry_like(keys)).keys, keys)


@pytest.mark.parametrize("codec", LOSSY)
@given(entries())
@settings(max_examples=40, deadline=None)
def test_what_is_not_smaller_does_not_become_smaller(codec: str, made: CacheEntry) -> None:
    keys, values = (tensor.float() for tensor in (made.keys, made.values))
    for tensor in (keys, values):
        tensor.clamp_(-60000, 60000)
    group = GROUP.get(codec, 64)
    keys = torch.cat([block.sort(dim=2)[0] for block in keys.split(group, dim=2)], dim=2)
    values = torch.cat([block.sort(dim=3)[0] for block in values.split(group, dim=3)], dim=3)
    read = through(codec, CacheEntry(keys, values, made.token_ids))
    for tensor, axis in ((read.keys, 2), (read.values, 3)):
        assert all((block.diff(dim=axis) >= 0).all() for block in tensor.split(group, dim=axis))


@pytest.mark.parametrize("codec", QUANTISED)
def test_float16_never_overflows(codec: str) -> None:
    for least in (-65504.0, -65503.0, 0.0, 60000.0):
        keys = torch.linspace(least, 65504, 32 * 5).to(torch.float16).view(1, 1, 32, 5)
        read = through(codec, entry_like(keys))
        assert read.keys.isfinite().all()
        assert read.values.isfinite().all()


@pytest.mark.parametrize("codec", QUANTISED)
def test_tiny_numbers_are_no_trap_where_the_processor_takes_them_for_zero(codec: str) -> None:
    keys = torch.tensor([1e-45, -1e-45, 1e-39, 2e-38]).repeat(40).view(1, 1, 40, 4)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot do that")
    try:
        read = through(codec, entry_like(keys))
    finally:
        torch.set_flush_denormal(False)
    assert (read.keys - keys).abs().max() < 2e-38


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 2 * LIMIT, -1e300])
@pytest.mark.parametrize("field", ["keys", "values"])
@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_what_is_no_number_or_too_great_is_refused(codec: str, number: float, field: str, place: int) -> None:
    made = entry(tokens=33, dtype=torch.float64)
    getattr(made, field).view(-1)[place] = number
    with pytest.raises(ValueError, match=rf"{field} reach .*take raw, which holds any"):
        encode(made, replace(IDENTITY, dtype="float64"), codec=codec)
    encode(made, replace(IDENTITY, dtype="float64"))


@pytest.mark.parametrize("codec", QUANTISED)
def test_the_greatest_number_that_is_taken_comes_back(codec: str) -> None:
    keys = torch.tensor([LIMIT, -LIMIT, 0.0]).view(1, 1, 1, 3)
    assert torch.equal(through(codec, entry_like(keys)).keys, keys)


def test_half_rounds_what_float16_rounds_and_refuses_what_it_does_not() -> None:
    assert through("half", entry_like(torch.full((1, 1, 1, 1), 65519.0))).keys.item() == 65504
    with pytest.raises(ValueError, match="numbers up to 65504, but rounded keys reach from inf"):
        through("half", entry_like(torch.full((1, 1, 1, 1), 65520.0)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_of_16_bits_is_refused(dtype: str) -> None:
    made = entry(dtype=getattr(torch, dtype))
    for call in (
        lambda: encode(made, replace(IDENTITY, dtype=dtype), codec="half"),
        lambda: CODECS["half"].pack(made),
    ):
        with pytest.raises(ValueError, match=rf"half of torch.{dtype} saves nothing; take raw"):
            call()


# --- how it lies in a file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_has_a_number_per_group_and_the_codes_last(dtype: str) -> None:
    geometry = Geometry(layers=2, kv_heads=3, tokens=33, head_dim=7, value_dim=65)
    int8 = {"key_scales": (2, 7), "value_scales": (33, 3), "key_codes": (33, 7), "value_codes": (33, 65)}
    int4 = {"key_scales": (1, 7), "key_lows": (1, 7), "value_scales": (33, 2), "value_lows": (33, 2)}
    int4 |= {"key_codes": (33, 4), "key_fifths": (5, 7), "value_codes": (33, 33)}
    for codec, wanted in (("int8", int8), ("int4", int4)):
        found = CODECS[codec].plan(geometry, getattr(torch, dtype))
        assert [(name, plan.shape) for name, plan in found.items()] == [
            (name, (2, 3, *shape)) for name, shape in wanted.items()
        ]
        small = {plan.dtype for name, plan in found.items() if name.endswith(("scales", "lows"))}
        assert small == {torch.float16 if dtype == "float16" else torch.bfloat16}


@pytest.mark.parametrize(("codec", "most"), [("half", 1.001), ("int8", 0.54), ("int4", 0.32)])
def test_an_object_of_a_thousand_tokens_has_the_promised_size(codec: str, most: float) -> None:
    sizes = {"layers": 30, "kv_heads": 3, "head_dim": 64, "value_dim": 64}
    geometry, header_bytes = Geometry(tokens=1000, **sizes), 10_000
    plans = CODECS[codec].plan(geometry, torch.float32).values()
    assert sum(plan.num_bytes for plan in plans) + header_bytes <= most * 2 * 30 * 3 * 1000 * 64 * 2


def test_a_byte_of_int4_holds_a_channel_of_each_half() -> None:
    values = torch.arange(5.0).view(1, 1, 1, 5) * 3.75  # 0 to 15
    packed = CODECS["int4"].pack(entry_like(values))
    assert packed["value_codes"].flatten().tolist() == [0 | 11 << 4, 4 | 15 << 4, 8]
    assert packed["value_lows"].tolist() == [[[[0.0]]]]
    assert packed["value_scales"].tolist() == [[[[1.0]]]]


def test_fifth_bits_of_keys_lie_by_eighths_of_the_tokens() -> None:
    keys = torch.arange(32.0).roll(5).view(1, 1, 32, 1)
    packed = CODECS["int4"].pack(entry_like(keys))
    codes = keys.flatten().long().tolist()
    assert packed["key_codes"].flatten().tolist() == [code & 15 for code in codes]
    rows = [sum((codes[row + 4 * bit] >> 4) << bit for bit in range(8)) for row in range(4)]
    assert packed["key_fifths"].flatten().tolist() == rows


def test_int8_holds_codes_from_minus_127_to_127() -> None:
    values = torch.tensor([-127.0, 1.4, 0.0, 127.0]).view(1, 1, 1, 4)
    packed = CODECS["int8"].pack(entry_like(values))
    assert packed["value_codes"].flatten().tolist() == [-127, 1, 0, 127]


@pytest.mark.parametrize("codec", LOSSY)
def test_a_stock_safetensors_reader_opens_the_file_of_every_codec(codec: str) -> None:
    made = entry(tokens=40)
    packed = CODECS[codec].pack(made)
    found = load(bytes(encode(made, IDENTITY, codec=codec)))
    assert set(found) == set(packed)
    assert all(same_bits(found[name], packed[name]) for name in packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_an_object_gives_its_entry_in_its_own_dtype(codec: str, dtype: str) -> None:
    if codec == "half" and dtype in ("bfloat16", "float16"):
        pytest.skip("refused")
    made, identity = entry(tokens=37, dtype=getattr(torch, dtype)), replace(IDENTITY, dtype=dtype)
    name = fingerprint(identity, made.token_ids)
    read = open_object(encode(made, identity, codec=codec), name=name, codec=codec).decode()
    assert read.equals(through(codec, made))
    assert read.keys.dtype == made.keys.dtype
    assert read.num_tokens == made.num_tokens
    if not CODECS[codec].prunes:
        assert read.keys.shape == made.keys.shape
        assert read.values.shape == made.values.shape


# --- how it is computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", QUANTISED)
def test_how_many_layers_are_worked_on_at_a_time_changes_nothing(
    codec: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = entry(tokens=70, dtype=getattr(torch, dtype))
    packed, read = packed_and_read(codec, made)
    monkeypatch.setattr(quantised, "_PART", 1)
    again, reread = packed_and_read(codec, made)
    assert all(same_bits(packed[name], again[name]) for name in packed)
    assert read.equals(reread)


@pytest.mark.parametrize("codec", LOSSY)
def test_packing_leaves_the_entry_as_it_is(codec: str) -> None:
    made, same = entry(tokens=40), entry(tokens=40)
    CODECS[codec].pack(made)
    assert made.equals(same)


@pytest.mark.parametrize("codec", LOSSY)
def test_strides_change_nothing(codec: str) -> None:
    made = entry(tokens=40)
    strided = CacheEntry(
        made.keys.transpose(1, 2).contiguous().transpose(1, 2), made.values.mT.contiguous().mT, made.token_ids
    )
    assert not strided.values.is_contiguous()
    assert encode(strided, IDENTITY, codec=codec) == encode(made, IDENTITY, codec=codec)
