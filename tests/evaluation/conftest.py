"""A tiny engine whose tokenizer reads a byte as a token, and results of rows that several modules look at."""

from typing import Any

import pytest
import torch
from benches import SUMMARY, results_of, rows_of

from kvlink import Engine
from tiny import byte_tokenizer
from tiny_models import tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def engine() -> Engine:
    tokenizer = byte_tokenizer()
    return Engine.from_pretrained(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def plain() -> list[dict[str, Any]]:
    """Results of three rows, teacher-forced."""
    return results_of(rows_of(3))


@pytest.fixture(scope="session")
def answered() -> list[dict[str, Any]]:
    """Results of two rows and a summary, with answers."""
    return results_of([*rows_of(2), SUMMARY], generate=True)
