"""Ways to attend give what one softmax over all columns gives, once their parts are merged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.models import backends
from kvlink.models.backends import Found, Sight, merge, merge_gathered

SCALE = 0.3


def tensors(rows: int, columns: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (6, rows, 8), (2, columns, 8), (2, columns, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def products(asked: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return asked @ keys.repeat_interleave(3, 0).transpose(1, 2)


@pytest.mark.parametrize("rows", [1, backends.FEW_ROWS, backends.FEW_ROWS + 1, 70])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_flash_kernel_gives_what_the_formula_gives(rows: int, causal: bool, dtype: torch.dtype) -> None:
    asked, keys, values = tensors(rows, rows if causal else 50, dtype=dtype)
    sight = Sight(causal=causal)
    wanted = backends.reference(asked, keys, values, scale=SCALE, sight=sight)
    found = backends.cpu(asked, keys, values, scale=SCALE, sight=sight)
    for ours, formula in zip(found, wanted, strict=True):
        assert ours.shape == formula.shape
        torch.testing.assert_close(ours, formula)


def test_the_formula_is_softmax() -> None:
    asked, keys, values = tensors(5, 9)
    seen = torch.rand(5, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[2] = False
    found, lse = backends.reference(asked, keys, values, scale=SCALE, sight=Sight(mask=seen), softcap=2.0)
    logits = 2.0 * torch.tanh(products(asked, keys) * SCALE / 2.0)
    wanted = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() @ values.repeat_interleave(3, 0)
    torch.testing.assert_close(found, wanted)
    assert bool((lse[:, 2] == -torch.inf).all())
    assert bool((found[:, 2] == 0).all())


@settings(derandomize=True, max_examples=40, deadline=None, database=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 6), st.booleans(), st.randoms())
def test_merged_parts_equal_one_softmax(columns: list[int], rows: int, sinks: bool, random: "st.random.Random") -> None:
    asked, keys, values = tensors(rows, sum(columns))
    seen = torch.tensor([[random.random() < 0.7 for _ in columns] for _ in range(rows)])
    seen[:, 0] = True
    learned = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) if sinks else None
    lse = torch.full((len(columns), 6, rows), -torch.inf, dtype=torch.float64)
    found: list[Found] = []
    parts = zip(keys.split(columns, 1), values.split(columns, 1), strict=True)
    for number, (some_keys, some_values) in enumerate(parts):
        here = torch.nonzero(seen[:, number])[:, 0]
        places = slice(0, rows) if len(here) == rows else here
        if len(here):
            part, lse[number, :, here] = backends.cpu(asked[:, here], some_keys, some_values, scale=SCALE)
            found.append((number, places, part))
    merged = merge(found, lse, sinks=learned)
    at = [list(range(rows)) if isinstance(places, slice) else places.tolist() for _, places, _ in found]
    slots = [sum(row in before for before in at[:number]) for number, here in enumerate(at) for row in here]
    gathered = merge_gathered(
        torch.cat([part for _, _, part in found], 1),
        torch.cat([lse[number, :, places] for number, places, _ in found], 1),
        torch.tensor([row for here in at for row in here]),
        torch.tensor(slots),
        rows,
        sinks=learned,
    )
    torch.testing.assert_close(gathered, merged)
    logits = products(asked, keys) * SCALE
    logits = logits.masked_fill(~seen.repeat_interleave(torch.tensor(columns), dim=1), -torch.inf)
    if learned is not None:
        logits = torch.cat((logits, learned[:, None, None].expand(-1, rows, 1)), dim=-1)
        values = torch.cat((values, torch.zeros(2, 1, 8, dtype=torch.float64)), dim=1)
    wanted = logits.softmax(-1) @ values.repeat_interleave(3, 0)
    torch.testing.assert_close(merged, wanted.transpose(0, 1))


def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    asked, keys, values = tensors(4, 6, dtype=torch.float32)
    found, sums = zip(*(backends.cpu(asked * size, keys, values, scale=SCALE) for size in (1.0, 300.0)), strict=True)
    merged = merge([(number, slice(0, 4), part) for number, part in enumerate(found)], torch.stack(sums))
    assert bool(merged.isfinite().all())


@pytest.mark.parametrize(
    ("device", "wanted"), [("cpu", backends.cpu), ("cuda", backends.cuda), ("mps", backends.reference)]
)
def test_each_device_has_its_way(device: str, wanted: backends.Backend) -> None:
    assert backends.backend_for(torch.device(device)) is wanted
