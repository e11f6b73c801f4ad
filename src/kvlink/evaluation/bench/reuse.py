"""Engines by reuse in the states in which a request can find them, each brought about before every run, untimed.

cold             objects on disk, page cache dropped, nothing resident, no beginning known, S neither
host             objects in memory, nothing resident, S known
warm             documents resident (shared) or entries held (assembled), in an order never seen, S known
known_beginning  the same documents in the same order have just been asked another question (shared alone)
"""

import random
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from kvlink.core.document import Document
from kvlink.core.layout import Prompt
from kvlink.engine.build import sessions_of
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Ids, Loaded, Loader, LoadTimes
from kvlink.engine.rates import Rates
from kvlink.engine.usage import Answer
from kvlink.evaluation.bench.page_cache import cached_share, drop_page_cache
from kvlink.evaluation.bench.watched import Watch, WatchedLoader, WatchedStore
from kvlink.evaluation.timing import Arm
from kvlink.models.links import LinkTokens
from kvlink.store.base import Store

Kind = Literal["shared", "assembled"]


@dataclass(slots=True)
class Case:
    """A row to be.

    Attributes:
        fields: What it is called.
        run: One measurement.
        facts: What the runs found besides seconds.
    """

    fields: dict[str, Any]
    run: Arm
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


class HeldLoader(WatchedLoader):
    """Hands out decoded entries that are held here: what a warm engine that assembles would have."""

    held: Mapping[Ids, Loaded]

    @contextmanager
    def load(self, segments: Sequence[Ids], times: LoadTimes | None = None) -> Generator[list[Loaded]]:
        """Hold the entries of these segments; nothing is read."""
        start = perf_counter()
        found = [self.held[ids] for ids in segments if self.name(ids)]
        if times:
            times.load_s += perf_counter() - start
        yield found


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One prompt's worth of work, and the stores that its objects lie in.

    Attributes:
        base: Gives the model.
        texts: Documents whose objects are in both stores.
        other: Another question, of the same length.
        folder: Where `disk` keeps them.
    """

    base: Engine
    texts: Sequence[Document]
    question: str
    other: str
    disk: Store
    host: Store
    folder: Path

    @property
    def ids(self) -> list[Ids]:
        """Ids of the documents."""
        return [self.base.prompter.document_ids(text) for text in self.texts]

    def prompt(self, texts: Iterable[Document] | None = None) -> Prompt:
        """Return the prompt of these documents, or of all, and the question."""
        prompter = self.base.prompter
        documents = tuple((prompter.document_ids(text),) for text in (self.texts if texts is None else texts))
        return Prompt(prompter.system_ids(None), documents, prompter.tail_ids(self.question))

    def loader(self, kind: type[WatchedLoader], store: Store, watch: Watch) -> Any:
        """Return a loader from one of the stores that loads in any case, even if encoding were faster."""
        base = self.base
        made = kind(
            runner=base.runner,
            store=WatchedStore(store, watch),
            identity=base.loader.identity,
            sink=base.loader.sink,
            rates=Rates(least=1 << 62),
        )
        made.watch = watch
        return made

    def fill(self) -> None:
        """Encode the documents into both stores."""
        for store in (self.disk, self.host):
            for _ in self.loader(WatchedLoader, store, Watch()).encode(self.ids, must_keep=True):
                pass

    def links(self, count: int) -> LinkTokens | None:
        """Return random link tokens: they cost what trained ones cost, and are never used to answer."""
        return LinkTokens.random(self.base.runner.embedding, num_links=count) if count else None


def loader_over(engine: Engine, store: Store) -> Loader:
    """Return a loader of an engine's model over another store, which loads whatever is there."""
    base = engine.loader
    rates = Rates(least=1 << 62)
    return Loader(runner=engine.runner, store=store, identity=base.identity, sink=base.sink, rates=rates)


class Reuse:
    """One engine of one kind with K random link tokens, over one of the stores."""

    def __init__(self, work: Work, kind: Kind, *, store: Store, links: int, held: Sequence[Loaded] = ()) -> None:
        """Make an engine that has loaded nothing.

        Args:
            held: Entries that are there already (assembled alone).
        """
        self.watch = Watch()
        self._work, self._kind = work, kind
        loader = work.loader(HeldLoader if held else WatchedLoader, store, self.watch)
        if held:
            loader.held = {one.entry.token_ids: one for one in held}
        base, tokens = work.base, work.links(links)
        sessions = sessions_of(loader, links=tokens, bundle="random") if kind == "shared" else None
        self.engine = Engine(
            runner=base.runner,
            prompter=base.prompter,
            loader=loader,
            report=base.report,
            links=tokens,
            sessions=sessions,
        )
        self._names = [loader.name(ids) for ids in work.ids]
        self._shuffler = random.Random(0)  # noqa: S311

    def case(self, state: str, **fields: Any) -> Case:
        """Return the row to be of a state."""
        case = Case({"arm": self._kind, "state": state, "links": self.engine.num_links, **fields}, run=lambda: None)
        prepare = {"cold": self.cool, "host": self.empty, "warm": self.warm, "known_beginning": self.ask_before}[state]

        def run() -> tuple[float, Mapping[str, float]]:
            case.facts.update(prepare() or {})
            texts = list(self._work.texts)
            if state != "known_beginning":
                self._shuffler.shuffle(texts)
            found = self.timed(case, texts)
            if state in ("cold", "host"):
                self._let_go()  # it would only take memory until the next run
            return found

        case.run = run
        return case

    def timed(self, case: Case, texts: Sequence[Document]) -> tuple[float, Mapping[str, float]]:
        """Ask the question about documents; returns the time to the first token and its parts."""
        self.watch.reset()
        answer = self._ask(texts, self._work.question)
        case.facts["computed_tokens"] = answer.usage.computed_tokens
        case.facts["sources"] = dict(Counter(row.source for row in answer.usage.documents))
        return answer.timings.ttft_s, self.watch.split(answer.timings, shared=self._kind == "shared")

    def empty(self) -> None:
        """Leave nothing resident and nothing known but S."""
        self._let_go()
        self.know_system()

    def cool(self) -> dict[str, Any]:
        """Leave nothing resident, nothing known, and no object in memory as far as the system obeys."""
        self._let_go()
        self.engine.forget_beginnings()
        drop_page_cache(self._work.folder)
        return {"page_cache_share": cached_share(self._work.folder)}

    def warm(self) -> None:
        """Have all documents resident, and nothing known but S."""
        if self._kind == "shared" and self._absent():
            self._ask(self._work.texts, self._work.other)
        self.know_system()

    def ask_before(self, texts: Sequence[Document] | None = None) -> None:
        """Have all documents resident and the beginning known that ends behind these, or all, in their order."""
        self.warm()
        self._ask(self._work.texts if texts is None else texts, self._work.other)

    def know_system(self) -> None:
        """Know S and nothing else. An engine that assembles learns S from a prompt with documents, and nothing else."""
        self.engine.forget_beginnings()
        self._ask([] if self._kind == "shared" else self._work.texts[:1], self._work.other)

    def _let_go(self) -> None:
        if not self.engine.forget(*self._names):
            raise RuntimeError("a request of the benchmark still holds documents")

    def _absent(self) -> bool:
        sessions = self.engine.sessions
        return sessions is None or sessions.residency.stats().num_residents < len(set(self._names))

    def _ask(self, texts: Sequence[Document], question: str) -> Answer:
        return self.engine.generate(texts, question, max_new_tokens=1)


def read_case(work: Work) -> Case:
    """Return the row to be that reads and verifies all objects from the disk, and does nothing with them."""
    loader = work.loader(WatchedLoader, work.disk, Watch())
    names = [loader.name(ids) for ids in work.ids]
    case = Case({"arm": "read", "state": "cold", "links": 0}, run=lambda: None)

    def run() -> tuple[float, Mapping[str, float]]:
        drop_page_cache(work.folder)
        num_bytes = 0
        start = perf_counter()
        for name in names:
            lease = work.disk.get(name, loader.accept)
            assert lease is not None, "it was put there"
            with lease:
                num_bytes += lease.object.num_bytes
        seconds = perf_counter() - start
        case.facts["bytes"] = num_bytes
        return seconds, {}

    case.run = run
    return case
