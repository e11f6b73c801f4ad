"""What an engine is made of: a model, a store, and what is kept between requests, until it is closed."""

from collections.abc import Iterable
from functools import cached_property

from kvlink.core.errors import TextUnavailable
from kvlink.engine.asking import Asking
from kvlink.engine.chat import Chat
from kvlink.engine.loader import Loader
from kvlink.engine.prefiller import Prefiller
from kvlink.engine.scheduler import Limits, Scheduler
from kvlink.engine.session import Sessions
from kvlink.engine.worker import Worker
from kvlink.models.adapter import Adapter
from kvlink.models.assembler import Assembler
from kvlink.models.links import LinkTokens
from kvlink.models.probe import ProbeReport
from kvlink.models.prompt import Prompter
from kvlink.models.runner import Runner
from kvlink.store.base import Store


class Opened:
    """The parts; `Engine` is what they do together."""

    def __init__(
        self,
        *,
        runner: Runner,
        prompter: Prompter | None,
        loader: Loader,
        report: ProbeReport,
        end_ids: Iterable[int] = (),
        links: LinkTokens | None = None,
        adapter: Adapter | None = None,
        sessions: Sessions | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        worker: Worker | None = None,
    ) -> None:
        """Take the parts; with `sessions` documents are attended where they lie, else assembled for each prompt.

        Args:
            limits: How many requests go on at once.
            worker: Runs the steps, together with those of other engines over the same model.
        """
        self.runner = runner
        self.loader = loader
        self.report = report
        self.assembler = Assembler(runner, links=links, adapter=adapter)
        self._prompter = prompter
        self._chats: dict[str, Chat] = {}
        self._end_ids = frozenset(end_ids)
        self.sessions = sessions
        self._assembling = Prefiller(assembler=self.assembler, loader=loader, lock=sessions and sessions.lock)
        self._worker = worker or (Worker(Scheduler(sessions, limits=limits)) if sessions else None)

    @property
    def store(self) -> Store:
        """Where entries are kept."""
        return self.loader.store

    @property
    def prompter(self) -> Prompter:
        """How text becomes ids.

        Raises:
            TextUnavailable: The model came without a tokenizer.
        """
        if self._prompter is None:
            raise TextUnavailable("this model has no tokenizer beside its weights, so no text can be read or written")
        return self._prompter

    @cached_property
    def _asking(self) -> Asking:
        return Asking(
            self.prompter,
            sessions=self.sessions,
            end_ids=self._end_ids,
            vocab=self.runner.embedding.num_embeddings,
            context=self.report.context,
            num_links=self.num_links,
            cut=self.cuts_documents,
        )

    @property
    def model_info(self) -> dict[str, str]:
        """Name and digest of the model, as they stand in result files."""
        return {"name": self.loader.provenance.get("model", ""), "digest": self.loader.identity.model}

    @property
    def num_links(self) -> int:
        """K: link tokens behind each document. 0 as long as no trained bundle is loaded."""
        return self.assembler.num_links

    @property
    def cuts_documents(self) -> bool:
        """Whether a document of more than 1,024 tokens becomes several segments: the links know two levels."""
        return self.assembler.links is not None and self.assembler.links.levels > 1

    def forget(self, *names: str) -> bool:
        """Let no new request find documents of these names on the device, nor what was computed behind them.

        Returns:
            Whether nothing of them is left there. If not, running requests read them: calling it again asks again.
        """
        return self.sessions is None or self.sessions.forget(*names)

    def forget_beginnings(self) -> None:
        """Forget keys and values of known beginnings, S among them; they are computed again when they are needed."""
        self._assembling.forget_beginnings()
        if self.sessions is not None:
            self.sessions.beginnings.clear()

    def close(self) -> None:
        """Give up what is under way, let go of what was loaded ahead, and close the store."""
        if self._worker is not None:
            self._worker.close()
        self.loader.close()
        self.store.close()
