"""A tiny engine whose tokenizer reads a byte as a token."""

import pytest
import torch

from kvlink import Engine
from tiny import byte_tokenizer
from tiny_models import tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def engine() -> Engine:
    tokenizer = byte_tokenizer()
    return Engine.from_pretrained(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer)
