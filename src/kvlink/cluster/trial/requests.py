"""Requests of a trace, sent at their moments to a real address whoever waits for what; and what came of each."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx

from kvlink.cluster.asked import usage_of
from kvlink.cluster.gateway import BACKEND

CHAT = "/v1/chat/completions"
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client has seen of one request; moments in seconds of the run.

    Attributes:
        asked_at, ended_at: When it was due, and when its last byte came.
        ttft_s: From then to its first token; None if none came.
        backend: Which one answered; 0 if none did.
        hits, tokens: Document tokens that were on that backend's device, and all.
        answer: Tokens of the answer.
        failed: What went wrong; empty where nothing did.
    """

    asked_at: float
    ended_at: float
    ttft_s: float | None
    backend: int = 0
    hits: int = 0
    tokens: int = 0
    answer: int = 0
    failed: str = ""


def body_of(model: str, documents: Sequence[str], question: str, answer: int) -> dict[str, Any]:
    """Return a request that is answered token by token, and tells its usage at the end."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "documents": [{"text": text} for text in documents],
        "temperature": 0,
        "max_tokens": answer,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def play(
    url: str,
    bodies: Callable[[int], dict[str, Any]],
    arrivals: Sequence[float],
    *,
    at: Sequence[tuple[float, Callable[[], None]]] = (),
    progress: Callable[[], None] = lambda: None,
) -> list[Seen]:
    """Send request number n at its moment, and return what was seen of each.

    Args:
        bodies: The body of a request by its number.
        arrivals: Seconds from the beginning.
        at: What else is to happen, and when; it must not take long.
        progress: Is told of each request that has ended.
    """
    return asyncio.run(_play(url, bodies, arrivals, at, progress))


def one_after_another(url: str, bodies: Sequence[dict[str, Any]]) -> list[Seen]:
    """Send each request when the one before it has ended."""

    async def go() -> list[Seen]:
        async with _client(url) as client:
            start = perf_counter()
            return [await _ask(client, body, start, perf_counter() - start) for body in bodies]

    return asyncio.run(go())


def all_at_once(url: str, bodies: Sequence[dict[str, Any]]) -> list[Seen]:
    """Send all requests now."""
    return play(url, bodies.__getitem__, [0.0] * len(bodies))


async def _play(
    url: str,
    bodies: Callable[[int], dict[str, Any]],
    arrivals: Sequence[float],
    at: Sequence[tuple[float, Callable[[], None]]],
    progress: Callable[[], None],
) -> list[Seen]:
    async with _client(url) as client:
        start = perf_counter()

        async def later(moment: float, what: Callable[[], None]) -> None:
            await asyncio.sleep(moment)
            await asyncio.to_thread(what)

        async def one(number: int, moment: float) -> Seen:
            found = await _ask(client, bodies(number), start, moment)
            progress()
            return found

        happening = [asyncio.create_task(later(*event)) for event in at]
        asking: list[asyncio.Task[Seen]] = []
        for number, moment in enumerate(arrivals):
            await asyncio.sleep(max(0.0, start + moment - perf_counter()))
            asking.append(asyncio.create_task(one(number, moment)))
        found = await asyncio.gather(*asking)
        await asyncio.gather(*happening)
        return list(found)


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False)


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], start: float, moment: float) -> Seen:
    first: float | None = None
    backend, usage, failed = 0, None, ""
    try:
        async with client.stream("POST", CHAT, json=body) as response:
            backend = int(response.headers.get(BACKEND, 0))
            if response.status_code != 200:
                failed = f"status {response.status_code}"
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                if first is None and not failed:
                    first = perf_counter() - start
                if '"usage"' in line:
                    usage = usage_of(line[len("data: ") :].encode())
                elif line.startswith('data: {"error"'):
                    failed = "broken"
    except httpx.TransportError as error:
        failed = type(error).__name__
    rows = usage["kvlink"]["documents"] if usage else []
    return Seen(
        asked_at=moment,
        ended_at=perf_counter() - start,
        ttft_s=None if first is None else first - moment,
        backend=backend,
        hits=sum(row["tokens"] for row in rows if row["source"] == "device"),
        tokens=sum(row["tokens"] for row in rows),
        answer=usage["completion_tokens"] if usage else 0,
        failed=failed or ("" if usage else "no usage"),
    )
