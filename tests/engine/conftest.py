"""What all tests of the engine share."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch

torch.set_num_threads(1)  # tiny products: a second thread waits more than it works


@pytest.fixture
def as_shipped() -> Iterator[None]:
    """Types are checked at run time in tests alone: switch that off, to see what a user sees."""
    jaxtyping.config.update("jaxtyping_disable", value=True)
    yield
    jaxtyping.config.update("jaxtyping_disable", value=False)
