"""A replica by itself, without Ray: what it serves once it counts as started."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlink.cluster.ray_app.passed import Passed
from kvlink.cluster.ray_app.replica import Replica
from kvlink.engine.catalogue import Catalogue
from kvlink.engine.record import Record
from kvlink.evaluation.bench.store_model import write_tiny_model
from kvlink.server.auth import Keys
from store.servers import RedisServer


class Kept(Replica):
    """Ends where the test says so, as Ray does."""

    end = Replica.__del__

    def __del__(self) -> None:  # type: ignore[override]
        pass


async def status(replica: Replica, path: str) -> int:
    passed = Passed(method="GET", path=path, query=b"", headers=(), body=b"")
    messages = [message async for message in replica.ask(passed)]
    return messages[0]["status"]


async def seen(settings: dict[str, Any], *ids: str) -> list[int]:
    """Start a replica; return whether it is ready, and how it answers about documents."""
    replica = Kept.__new__(Kept)
    await Kept.__init__(replica, settings, Keys(), None)
    try:
        return [await status(replica, path) for path in ("/ready", *(f"/v1/documents/{one}" for one in ids))]
    finally:
        await replica.end()


@pytest.mark.enable_socket
def test_texts_of_the_folder_that_replicas_share_are_in_the_journal_once_one_is_up(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with closing(Catalogue(tmp_path / "library")) as catalogue:
        catalogue.put(Record("hut", "It opens at five."), reading="none", segments=[])
    model = write_tiny_model(tmp_path / "tiny", seed=0)
    with RedisServer() as texts:
        settings: dict[str, Any] = {"model": str(model), "links": "none", "device_memory": 0.1, "deadline": 60.0}
        settings["journal"] = texts.url
        shared, empty = ({**settings, "library": str(tmp_path / name)} for name in ("library", "empty"))
        assert asyncio.run(seen(shared, "hut", "inn")) == [200, 200, 404]
        assert asyncio.run(seen(empty, "hut")) == [200, 200]
    assert not list(tmp_path.glob("*/replica-*"))
