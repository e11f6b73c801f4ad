"""A request under way in a shared engine: its own rows, the documents it reads, and what is left to compute.

    begin: hold documents, find the known beginning -> advance, some rows at a time -> end: keep the rows, let go

Documents lie in the device tier; a session owns the keys and values of its own tokens alone. Knows no text.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Lock

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlink.core.layout import Kind, Prompt
from kvlink.engine.beginnings import Beginnings
from kvlink.engine.hold import Held, Hold, Opening
from kvlink.engine.items import Entry, Item, Links, Run, first_rows, merged, num_links_in
from kvlink.engine.loaded import LoadTimes
from kvlink.engine.request import Order, Request
from kvlink.engine.residency import Residency
from kvlink.models.adapter import Adapter
from kvlink.models.draft import Draft
from kvlink.models.links import LinkTokens, embed
from kvlink.models.rows import OwnRows, Readable
from kvlink.models.rows import Run as Rows
from kvlink.models.runner import Runner
from kvlink.models.shared import forward
from kvlink.store.codec import RAW


@dataclass(slots=True, eq=False)
class Session:
    """One request under way.

    Attributes:
        request: What was asked; its documents in the order in which they are read.
        held: Where each segment came from, in that order.
        own: Keys and values of its own tokens.
        documents: Segments with their first positions.
        left: Positions of the prompt that are not computed yet.
        embeds: Input embeddings of those.
        num_links: Link tokens in the prompt.
        known_rows, known_links: Own tokens whose keys and values were known, and how many of them are link tokens.
        ids: Tokens that were appended since it began.
        logits: Of the last row, once the prompt is computed.
    """

    request: Request
    held: list[Held]
    own: OwnRows
    documents: list[tuple[Readable, int]]
    left: Int[Tensor, " rows"]
    embeds: Float[Tensor, "rows hidden"]
    num_links: int
    items: list[Item]
    behind: int | None
    length: int
    known_rows: int = 0
    known_links: int = 0
    ids: list[int] = field(default_factory=list)
    logits: Float[Tensor, " vocab"] | None = None
    hold: Hold | None = None
    keep: bool = True
    """Whether it becomes a known beginning: not where a document of it was removed in the meantime."""

    def append(self, token: int, runner: Runner, embeds: Float[Tensor, "1 hidden"] | None = None) -> None:
        """Let a token be computed next; its input embedding is looked up if it is not given."""
        self.left = torch.tensor([self.length + len(self.ids)])
        self.embeds = runner.embed([token]) if embeds is None else embeds
        self.ids.append(token)


class Sessions:
    """Begins, advances and ends the sessions of one engine. One thread at a time.

    Args:
        root: What all beginnings of this engine share: the model's digest, that of the adapter, the scope.
        bundle: Digest of the bundle, which names its link tokens.

    Attributes:
        lock: Held by whoever runs the model.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        residency: Residency,
        beginnings: Beginnings,
        links: LinkTokens | None,
        adapter: Adapter | None,
        root: tuple[str, ...],
        bundle: str,
    ) -> None:
        self.lock = Lock()
        self._running: set[Session] = set()
        self._openings: set[Opening] = set()
        self.runner, self.residency, self.beginnings = runner, residency, beginnings
        self._links, self._adapter = links, adapter
        self.root, self.bundle = root, bundle

    def over(self, residency: Residency, *, root: tuple[str, ...]) -> "Sessions":
        """Return those of another scope: the same model, links and tree, other documents."""
        made = copy(self)
        made.residency, made.root = residency, root
        return made

    @property
    def num_links(self) -> int:
        """K, the link tokens behind each segment."""
        return self._links.num_links if self._links else 0

    def open(self, request: Request, *, reuse: bool = True, times: LoadTimes | None = None) -> Opening:
        """Hold what is there of a request's documents, or reserve room for it: what `begin` needs.

        Args:
            reuse, times: As in `begin`.

        Raises:
            DeviceOverflow, DeviceBusy: As in `begin`.
        """
        opening = self.residency.open(_asked(request, reuse=reuse).prompt.segments, times)
        self._openings.add(opening)
        return opening

    def close(self, opening: Opening) -> None:
        """Let go of documents of a request that is not begun."""
        self._openings.discard(opening)
        opening.release()

    def begin(
        self,
        request: Request,
        *,
        room: int,
        order: Order = "given",
        reuse: bool = True,
        last: bool = True,
        times: LoadTimes | None = None,
        said: Sequence[int] = (),
        opening: Opening | None = None,
    ) -> Session:
        """Hold a request's documents and find its known beginning.

        Args:
            room: Rows for the answer.
            order: Whether documents may be read in another order than given.
            reuse: False takes documents as part of one causal run, and nothing as known.
            last: False leaves the prompt's last token out.
            times: Is told how long loads and encodes took.
            said: Tokens of the answer that were there when the session was given up.
            opening: Of the same request, with nothing missing; without one, what is absent is encoded now.

        Raises:
            DeviceOverflow: The documents take more than the whole budget.
            DeviceBusy: They take more than what running sessions leave.
        """
        request = _asked(request, reuse=reuse)
        hold = self.residency.hold(request.prompt.segments, times) if opening is None else opening.hold()
        try:
            if order == "reuse":
                request, hold.held = self._reordered(request, hold.held)
            session = self._laid_out(request, hold.held, room=room, last=last, said=said)
            if reuse:
                self._recall(session)
        except BaseException:
            hold.release()
            raise
        session.hold, session.keep = hold, reuse and (opening is None or opening.keep)
        self._running.add(session)
        if opening is not None:
            self._openings.discard(opening)
        return session

    def advance(self, work: Sequence[tuple[Session, int]], drafts: Sequence[tuple[Draft, int]] = ()) -> None:
        """Compute the next rows of some sessions in one forward; those with none left get their logits.

        Args:
            work: Sessions and how many of their rows to compute.
            drafts: Segments to be encoded, and how many of their rows.
        """
        runs: list[Rows] = []
        embeds: list[Tensor] = []
        keep: list[int] = []
        ready: list[Session] = []
        count = 0
        for session, number in work:
            runs.append(Rows(session.own, session.left[:number], session.documents))
            embeds.append(session.embeds[:number])
            count += number
            if number == len(session.left):
                keep.append(count - 1)
                ready.append(session)
        for draft, number in drafts:
            run, rows = draft.rows(number)
            runs.append(run)
            embeds.append(rows)
        lengths = [run.own.length for run in runs]
        try:
            logits = forward(
                self.runner,
                runs,
                torch.cat(embeds),
                keep=torch.tensor(keep, device=self.runner.device, dtype=torch.long),
                adapter=self._adapter,
                factor=self._factor([*(session.behind for session, _ in work), *(None for _ in drafts)], runs),
            )
        except BaseException:
            for run, length in zip(runs, lengths, strict=True):
                run.own.length = length  # as if it had not been tried
            raise
        for session, number in work:
            session.left, session.embeds = session.left[number:], session.embeds[number:]
            if not len(session.left):  # a view would keep all of the prompt's
                session.embeds = session.embeds.new_empty(0, session.embeds.shape[1])
        for session, row in zip(ready, logits, strict=True):
            session.logits = row

    def end(self, session: Session) -> None:
        """Keep what was computed as a known beginning, and let go of the documents. A second time does nothing."""
        if session.hold is None:
            return
        self._running.discard(session)
        try:
            if session.keep:
                items = merged([*session.items, Run(tuple(session.ids))])
                rows = slice(0, session.own.length)
                self.beginnings.insert(
                    self.root,
                    first_rows(items, session.own.length),
                    session.own.keys[:, :, rows],
                    session.own.values[:, :, rows],
                )
        finally:
            session.hold.release()
            session.hold = None

    def forget(self, *names: str) -> bool:
        """Let no new request find documents of these names, nor what was computed behind them.

        Returns:
            Whether nothing of them is left. If not, running requests read them: calling it again asks again.
        """
        gone = set(names)
        for session in self._running.copy():
            if gone.intersection(one.name for one in session.held):
                session.keep = False
        for opening in self._openings.copy():
            opening.keep = opening.keep and gone.isdisjoint(opening.names)
        self.beginnings.drop_entries(gone)
        return self.residency.drop(*names)

    def _laid_out(self, request: Request, held: list[Held], *, room: int, last: bool, said: Sequence[int]) -> Session:
        """Return a session of which nothing is computed."""
        prompt = request.prompt
        layout = prompt.layout(num_links=self.num_links)
        rows = layout.request_rows()
        rows = rows if last else rows[:-1]
        ids = torch.cat((prompt.ids(layout)[rows], torch.tensor(said, dtype=torch.long))).to(self.runner.device)
        rows = torch.cat((rows, torch.arange(len(layout), len(layout) + len(said))))
        spans = layout.of(Kind.SEGMENT)
        with torch.inference_mode():
            embeds = embed(self.runner.embedding, self._links, ids)
        return Session(
            request=request,
            held=held,
            own=OwnRows(self.runner, len(rows) + room),
            documents=[(one.resident, span.start) for one, span in zip(held, spans, strict=True)],
            left=rows,
            embeds=embeds,
            num_links=layout.num_link_tokens,
            items=merged([*self._items(prompt, held), Run(tuple(said))]),
            behind=layout.behind_documents,
            length=len(layout) + len(said),
        )

    def _recall(self, session: Session) -> None:
        """Copy what is known of a session's beginning; its last row is computed in any case."""
        with self.beginnings.match(self.root, session.items, at_most=len(session.left) - 1) as found:
            own, known = session.own, found.num_rows
            found.copy_into(own.keys, own.values)
        own.positions[:known] = session.left[:known]
        own.length = session.known_rows = known
        session.known_links = num_links_in(session.items, known)
        session.left, session.embeds = session.left[known:], session.embeds[known:]

    def _items(self, prompt: Prompt, held: Sequence[Held]) -> list[Item]:
        items: list[Item] = []
        for piece in prompt.pieces(num_links=self.num_links):
            if piece[0] == "ids":
                items.append(Run(piece[1]))
            elif piece[0] == "segment":
                items.append(_entry(held[piece[1]]))
            else:
                items.append(Links(self.bundle, piece[1], self.num_links))
        return items

    def _reordered(self, request: Request, held: list[Held]) -> tuple[Request, list[Held]]:
        """Put those documents of the last turn first behind which most is known. Labels stay with their places."""
        prompt = request.prompt
        before = sum(len(document) for turn in prompt.history for document in turn.documents)
        left = iter(held[before:])
        parts = [list(islice(left, len(document))) for document in prompt.documents]
        items = self._items(prompt, held)
        entries = [at for at, item in enumerate(items) if isinstance(item, Entry)]
        head = items[: entries[before]] if parts else items
        labels = [Run(label) for label in prompt.labels]
        if labels and isinstance(last := head[-1], Run):
            head[-1] = Run(last.ids[: len(last) - len(labels[0])])
        documents = [[item for one in part for item in self._behind(one, part)] for part in parts]
        order = self.beginnings.longest(self.root, head, documents, labels=labels)
        request = replace(
            request,
            prompt=replace(prompt, documents=tuple(prompt.documents[at] for at in order)),
            kept=tuple(request.kept[at] for at in order),
        )
        return request, [*held[:before], *(one for at in order for one in parts[at])]

    def _behind(self, one: Held, part: Sequence[Held]) -> list[Item]:
        level = 0 if one is part[-1] else 1
        return [_entry(one), *([Links(self.bundle, level, self.num_links)] if self.num_links else [])]

    def _factor(self, behind: Sequence[int | None], runs: Sequence[Rows]) -> Tensor | None:
        """Return which rows the adapter acts on: those behind the first document of a request."""
        if self._adapter is None:
            return None
        acts = [
            torch.zeros(len(run.positions)) if first is None else (run.positions >= first).float()
            for first, run in zip(behind, runs, strict=True)
        ]
        return torch.cat(acts).to(self.runner.device, self.runner.dtype)


def _entry(held: Held) -> Entry:
    return Entry(held.name, held.codec or RAW, held.resident.num_tokens)


def _asked(request: Request, *, reuse: bool) -> Request:
    """Return what is computed of a request."""
    return request if reuse else replace(request, prompt=_plain(request.prompt))


def _plain(prompt: Prompt) -> Prompt:
    """Return the same ids as a prompt without documents."""
    ids = prompt.ids(prompt.layout()).tolist()
    return Prompt(prompt.system, (), tuple(ids[len(prompt.system) :]))
