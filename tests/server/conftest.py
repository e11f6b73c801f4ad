"""One server for all tests that change nothing of it; the loopback is open to them."""

from collections.abc import Iterator

import pytest
import torch
from live import MODEL, Live, live, tiny_engine

from kvlink.engine.library import Library
from kvlink.server.served import Served

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("library")
    with tiny_engine(folder / "entries") as engine, Library(folder, engine) as library:
        served = Served(engine=engine, library=library, model=MODEL, max_bytes=1 << 20)
        with live(served) as one:
            yield one
