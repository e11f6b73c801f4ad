"""From a request's ids to a computed prompt whose documents are read where they lie. The same doors as `Prefiller`.

hold documents (device tier) -> known beginning -> one forward over what is left -> decode
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.engine.loaded import LoadTimes
from kvlink.engine.prefiller import computed_rows, document_rows
from kvlink.engine.request import Order, Request
from kvlink.engine.session import Session, Sessions
from kvlink.engine.stream import Prefilled
from kvlink.engine.usage import Timings, Usage


class SharedPrefiller:
    """Computes prompts of one model whose documents lie in its device tier.

    Attributes:
        lock: Held by whoever runs the model.
    """

    def __init__(self, sessions: Sessions) -> None:
        self.lock = sessions.lock
        self.sessions = sessions

    def forget_beginnings(self) -> None:
        """Forget keys and values of all beginnings, S among them."""
        self.sessions.beginnings.clear()

    @contextmanager
    def prefilled(
        self,
        request: Request,
        *,
        room: int,
        labels: bool,
        last: bool = True,
        reuse: bool = True,
        order: Order = "given",
        times: Timings = Timings(),  # noqa: B008 (frozen)
    ) -> Generator[Prefilled]:
        """Compute a prompt and hold its rows while the block lasts; behind it they are a known beginning.

        Args:
            room: Rows for the answer.
            last: False leaves the prompt's last token to be computed by whoever continues.
            reuse: False computes everything in one causal forward, of which nothing is known or kept.
            order: Whether documents may be read in another order than given.
            times: What was spent before.
        """
        spent = LoadTimes()
        with self.lock, torch.inference_mode(mode=False):
            start = perf_counter()
            session = self.sessions.begin(request, room=room, order=order, reuse=reuse, last=last, times=spent)
            begun_s = perf_counter() - start - spent.load_s - spent.encode_s
            try:
                start = perf_counter()
                if len(session.left):
                    self.sessions.advance([(session, len(session.left))])
                self.sessions.runner.synchronize()
            except BaseException:
                session.keep = False
                self.sessions.end(session)
                raise
            times = replace(
                times,
                load_s=spent.load_s,
                encode_s=spent.encode_s,
                rotate_s=begun_s,
                forward_s=perf_counter() - start,
            )
        logits = session.logits
        rows = self.sessions.runner.embedding.weight.new_empty(0, 0) if logits is None else logits[None]
        try:
            yield Prefilled(session, rows, room, usage_of(request, session, labels=labels, reuse=reuse), times)
        finally:
            with self.lock:
                self.sessions.end(session)

    def decode(self, session: Session, token: int) -> Float[Tensor, " vocab"]:
        """Append a token and return the next logits."""
        with self.lock, torch.inference_mode(mode=False):
            session.append(token, self.sessions.runner)
            self.sessions.advance([(session, 1)])
            assert session.logits is not None, "all its rows are computed"
            return session.logits


def usage_of(request: Request, session: Session, *, labels: bool, reuse: bool) -> Usage:
    """Return what a prompt used; its documents stand in the order of the request."""
    asked = session.request
    if not reuse or not asked.prompt.segments:
        known = session.known_rows
        rows = computed_rows(request)
        return Usage(request.prompt.num_tokens, known, 0, 0, "exact", labels=labels, documents=rows)
    found = sum(one.resident.num_tokens for one in session.held if one.codec)
    return Usage(
        prompt_tokens=request.prompt.num_tokens,
        cached_tokens=found + session.known_rows - session.known_links,
        link_tokens=session.num_links,
        completion_tokens=0,
        mode="documents",
        labels=labels,
        documents=document_rows(asked, session.held),
        known_links=session.known_links,
    )
