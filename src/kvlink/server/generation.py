"""`/v1/chat/completions` and `/v1/completions`: from a body to jobs, from jobs to a response, whole or streamed."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvlink.core.errors import ContextOverflow, KVLinkError
from kvlink.engine.job import Piece
from kvlink.engine.task import Task
from kvlink.server.conversation import Brought, brought_by, conversation_of
from kvlink.server.protocol import COMPLETION_TOKENS, Asked, ChatRequest, CompletionRequest
from kvlink.server.refusals import Refused, answer, refusal_of
from kvlink.server.replies import Reply
from kvlink.server.running import Running
from kvlink.server.served import Served
from kvlink.server.view import View
from kvlink.server.watching import Watching

Told = AsyncGenerator[tuple[int, Piece | None]]


def routes(served: Served) -> APIRouter:
    """Return the routes that generate."""
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer the last message of a conversation."""
        served.check_model(body.model)
        view = served.view(request.scope["kvlink.tenant"])
        brought = await asyncio.to_thread(brought_by, served, body)

        def asked() -> list[Task]:
            return chat_jobs(served, view, body, brought)

        jobs = await (view.found(asked) if brought.ids else asyncio.to_thread(asked))
        return await _response(served, body, jobs, request, logprobs=body.logprobs, is_chat=True)

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with texts as they stand."""
        served.check_model(body.model)
        view = served.view(request.scope["kvlink.tenant"])
        jobs = await asyncio.to_thread(completion_jobs, served, view, body)
        return await _response(served, body, jobs, request, logprobs=body.logprobs is not None, is_chat=False)

    return router


def chat_jobs(served: Served, view: View, body: ChatRequest, brought: Brought) -> list[Task]:
    """Return one job per choice."""
    asked = conversation_of(view, brought, labels=body.labels)
    schema = body.response_format and body.response_format.schema_to_follow
    logprobs = body.top_logprobs if body.logprobs else None

    def job(choice: int, room: int) -> Task:
        return asked.engine.job(
            asked.documents,
            asked.question,
            system=asked.system,
            history=asked.history,
            labels=body.labels,
            max_new_tokens=room,
            stop=body.stop,
            sampling=body.sampling(choice, logprobs=logprobs, schema=schema),
            reuse=not served.exact,
            deadline_s=served.deadline_s,
        )

    wanted = body.max_completion_tokens or body.max_tokens
    room = wanted or served.max_new_tokens
    first = _short_enough(served, job(0, room) if wanted else _fitted(lambda fitting: job(0, fitting), room))
    room = first.sampler.params.max_new_tokens
    return [first, *(job(choice, room) for choice in range(1, body.n))]


def completion_jobs(served: Served, view: View, body: CompletionRequest) -> list[Task]:
    """Return one job per prompt and choice, the choices of a prompt side by side."""
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if len(texts) * body.n > served.most_jobs:
        raise Refused(400, f"{len(texts)} prompts with {body.n} choices are more than {served.most_jobs}", param="n")
    return [
        _short_enough(
            served,
            view.engine.completion(
                text,
                max_new_tokens=body.max_tokens or COMPLETION_TOKENS,
                stop=body.stop,
                sampling=body.sampling(choice, logprobs=body.logprobs),
                deadline_s=served.deadline_s,
            ),
        )
        for text in texts
        for choice in range(body.n)
    ]


def _fitted(job: Callable[[int], Task], room: int) -> Task:
    """Return a job with as much room for its answer as there is, at most `room`."""
    try:
        return job(room)
    except ContextOverflow as error:
        if error.over >= room:
            raise
        return job(room - error.over)


def _short_enough(served: Served, job: Task) -> Task:
    """Return a job whose prompt is no longer than the server takes."""
    most, tokens = served.max_prompt_tokens, job.request.prompt.num_tokens
    if most is not None and tokens > most:
        raise Refused(
            400,
            f"the prompt has {tokens} tokens, and this server takes {most}",
            code="context_length_exceeded",
            param="messages",
        )
    return job


async def _response(
    served: Served, body: Asked, jobs: list[Task], request: Request, *, logprobs: bool, is_chat: bool
) -> Response:
    """Submit the jobs and answer, once there is something to say."""
    reply = Reply(served.model, is_chat, served.token_text, jobs[0].end_ids, note=served.exact)
    running = Running(jobs, served.engine, Watching(served, request.scope))
    told = running.pieces()
    watch = asyncio.create_task(_cancelled_by(request, running))
    try:
        running.submit()
        first = await anext(told)  # what fails before it has a status of its own
        if body.stream:
            events = _events(reply, running, told, first, logprobs=logprobs, usage=body.wants_usage)
            return _Events(running, events)
        pieces: list[list[Piece]] = [[] for _ in jobs]
        async for number, piece in _with(first, told):
            if piece is not None:
                pieces[number].append(piece)
        return answer(reply.whole(jobs, pieces, logprobs=logprobs))
    except BaseException:
        running.cancel()
        raise
    finally:
        watch.cancel()


async def _cancelled_by(request: Request, running: Running) -> None:
    """Wait until the client has left, and give its jobs up then."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    running.cancel()


class _Events(StreamingResponse):
    """Server-sent events; whoever stops reading them, at whatever moment, gives the jobs up."""

    def __init__(self, running: Running, events: AsyncGenerator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


async def _with(first: tuple[int, Piece | None], told: Told) -> Told:
    yield first
    async for one in told:
        yield one


async def _events(
    reply: Reply, running: Running, told: Told, first: tuple[int, Piece | None], *, logprobs: bool, usage: bool
) -> AsyncGenerator[str]:
    """Yield server-sent events; what fails on the way is one of them."""
    try:
        for index in range(len(running.jobs)):
            if opening := reply.opening(index):
                yield _event(opening)
        offsets = [0] * len(running.jobs)
        async for index, piece in _with(first, told):
            if piece is None:
                yield _event(reply.ending(index, running.jobs[index]))
                continue
            if chunk := reply.chunk(index, piece, logprobs=logprobs, offset=offsets[index]):
                yield _event(chunk)
            if logprobs and piece.token is not None and piece.token.id not in reply.ends:
                offsets[index] += len(reply.token_text(piece.token.id))
        if usage:
            yield _event(reply.usage(running.jobs))
        yield "data: [DONE]\n\n"
    except KVLinkError as error:
        yield _event(refusal_of(error).body)


def _event(body: Any) -> str:
    return f"data: {json.dumps(body)}\n\n"
