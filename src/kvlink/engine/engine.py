"""The engine: documents and a question in, an answer out; each document computed once and reused at any place.

    ids -> documents (resident, store, else encode) -> known beginning -> prefill of links and T -> decode

Documents are attended where they lie (shared), or laid out in a buffer of each prompt (assembled); never both in one
engine. One thread runs the model at a time. Without documents a prompt is one plain causal forward of the base model.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvlink.core.errors import InputError
from kvlink.core.layout import Turn
from kvlink.engine.asking import params_of
from kvlink.engine.assembled import Assembled
from kvlink.engine.build import Attention, SinkKind, build
from kvlink.engine.chat import Chat
from kvlink.engine.corpus_encoding import encode_documents
from kvlink.engine.job import Job
from kvlink.engine.limits import Limits, SchedulerStats
from kvlink.engine.loader import Loader
from kvlink.engine.opened import Opened
from kvlink.engine.prefetch import Prefetch
from kvlink.engine.request import DocumentLike, Order, Overflow, as_documents
from kvlink.engine.sampling import MAX_NEW_TOKENS, SamplingParams
from kvlink.engine.stream import Stream, told
from kvlink.engine.task import Task
from kvlink.engine.usage import Answer, DocumentUsage
from kvlink.engine.worker import Found, Worker
from kvlink.models.bundle import Bundle
from kvlink.store.opening import StoreLike


class Engine(Opened):
    """Answers questions about documents with one model and one store.

    Build one with `Engine.from_pretrained`; the constructor takes ready parts.
    """

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | Any = "demo",
        *,
        store: StoreLike = None,
        tokenizer: Any = None,
        sink: SinkKind = "header",
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        context: int | None = None,
        secret: bytes | None = None,
        store_key: bytes | None = None,
        links: str | Path | Bundle | None = "auto",
        foreign_links: bool = False,
        attention: Attention = "auto",
        recompress: bool = True,
        device_bytes: int | None = None,
        limits: Limits | None = None,
    ) -> "Engine":
        """Load a model, prove that reuse is exact on it, and open a store.

        Args:
            model: `demo`, a folder, a hub name, a `.gguf` file, or a ready model.
            tokenizer: What reads and writes text; the one beside the weights if None.
            store: A folder, a URL (`redis://...`, `s3://bucket/kv`), a ready store, or None for one in memory that ends
                with the process; several of these, fastest first, become tiers below one in memory.
            sink: What stands before each document while it is encoded; `header` is best without training.
            dtype: float32 on a CPU and bfloat16 on a GPU if None.
            context: Positions to accept; what the model was made for if None.
            secret: Keys the digests of stored objects, so that nobody without it can forge one.
            store_key: 32 bytes that encrypt objects on disks and in remotes; a ready store brings its own.
            links: Trained link tokens: a file that `kvlink train` wrote, a ready bundle, `auto` for those that ship for
                exactly this model, or None for none.
            foreign_links: Take links of other weights of the same shape, such as another quantisation.
            attention: `shared` reads documents where they lie, `assembled` copies them into each prompt; `auto` shares
                where the probe found it exact.
            recompress: When the store fills up, write this model's least used entries in the codecs that its gate has
                passed (`kvlink store calibrate`), before any entry is dropped.
            device_bytes: What documents and known beginnings may take on the device together; 40 % of a GPU's memory,
                on a CPU a quarter of the machine's, if None.
            limits: How many requests go on at once, and with how many rows and bytes; the defaults of `Limits` if None.

        Raises:
            ModelRefused: Reuse would not be exact on this model; the message holds the figures.
            ModelError: It cannot be loaded.
            StoreUnusable: The folder cannot be used as a store.
            BundleRefused: The links were trained for other weights, or cannot be read.
        """
        return cls(
            **build(
                model,
                store=store,
                tokenizer=tokenizer,
                sink=sink,
                dtype=dtype,
                device=device,
                context=context,
                secret=secret,
                store_key=store_key,
                links=links,
                foreign_links=foreign_links,
                attention=attention,
                recompress=recompress,
                device_bytes=device_bytes,
            ),
            limits=limits or Limits(),
        )

    def encode(
        self, docs: Sequence[DocumentLike], *, progress: Callable[[DocumentUsage], None] | None = None
    ) -> list[DocumentUsage]:
        """Encode documents into the store, those that it does not hold yet.

        Interrupted at any time, what was encoded so far is kept. Blank documents are skipped.

        Args:
            docs: Texts, Documents, or mappings with `text` and perhaps `title`.
            progress: Called with each document as it is done.

        Returns:
            One row per document, in their order.

        Raises:
            StoreFull, StoreUnusable: The store cannot take another entry; those before are kept.
        """
        return encode_documents(
            as_documents(docs),
            loader=self.loader,
            segments=lambda document: self.prompter.segments(document, cut=self.cuts_documents),
            context=self.report.context,
            lock=self._assembling.lock,
            progress=progress,
        )

    def generate(self, docs: Sequence[DocumentLike], question: str, **options: Any) -> Answer:
        """Answer a question from documents, at once; options are those of `job`."""
        stream = self.stream(docs, question, **options)
        for _ in stream:
            pass
        return stream.answer

    def stream(self, docs: Sequence[DocumentLike], question: str, **options: Any) -> Stream:
        """Answer piece by piece: iterate for text, then read `.answer`. Options are those of `job`.

        Requests of several threads go through the model together.
        """
        job = self.job(docs, question, **options)
        if self._worker is not None:
            return Stream(told(job, self._worker.submit, self._worker.drive))
        return Stream(self._assembling.pieces(job))

    def job(
        self,
        docs: Sequence[DocumentLike],
        question: str,
        *,
        system: str | None = None,
        labels: bool = False,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        on_overflow: Overflow = "error",
        reuse: bool = True,
        order: Order = "given",
        history: Sequence[Turn] = (),
        deadline_s: float | None = None,
    ) -> Task:
        """Return a request as a job: `submit` it, then read its pieces.

        Args:
            docs: Texts, Documents, or mappings with `text` and perhaps `title`, in the order the model shall read.
            question: The question; documents stand before it in the user's turn.
            system: System prompt; the chat template's default if None.
            labels: Put `[1] `, `[2] `, ... before the documents, for citations.
            max_new_tokens: The answer's longest length; that of `sampling` if None, else 128.
            stop: Strings at which the answer ends, besides those of `sampling`; not part of it.
            sampling: How tokens are chosen; greedily if None.
            on_overflow: What to do with more than the context holds: `error`, or `drop_last` documents.
            reuse: False computes the very same ids in one causal forward, for comparison.
            order: `reuse` lets the model read documents in the order behind whose beginning most is known.
            history: Earlier turns as ids; `chat` keeps them for you.
            deadline_s: Seconds after which the request is given up; None for never.
        """
        start = perf_counter()
        params = params_of(sampling, max_new_tokens=max_new_tokens, stop=stop)
        room = params.max_new_tokens
        request = self._asking.request(
            docs, question, system=system, labels=labels, room=room, on_overflow=on_overflow, history=history
        )
        return self._asking.task(
            request, params, order=order, reuse=reuse, labels=labels, deadline_s=deadline_s, start=start
        )

    def completion(
        self,
        text: str,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        deadline_s: float | None = None,
    ) -> Task:
        """Return a job that goes on with a text as it stands, without a chat template; arguments are those of `job`.

        The text stands behind the model's beginning of sequence (the template's first id where it has none).
        """
        start = perf_counter()
        params = params_of(sampling, max_new_tokens=max_new_tokens, stop=stop)
        request = self._asking.plain(text, room=params.max_new_tokens)
        return self._asking.task(
            request, params, order="given", reuse=True, labels=False, deadline_s=deadline_s, start=start
        )

    def chat(self, name: str, *, system: str | None = None, labels: bool = False) -> Chat:
        """Return the conversation of this name; a new one if there is none.

        Args:
            name: Names it in this engine.
            system, labels: As in `generate`, for all of its turns; a conversation that goes on keeps its own.
        """
        if name not in self._chats:
            self._chats[name] = Chat(self.stream, self.prompter, cut=self.cuts_documents, system=system, labels=labels)
        return self._chats[name]

    def end_chat(self, name: str) -> None:
        """Forget a conversation. What was computed for it stays a known beginning until there is no room for it."""
        self._chats.pop(name, None)

    def assemble(
        self,
        docs: Sequence[DocumentLike],
        question: str,
        *,
        system: str | None = None,
        labels: bool = False,
        max_new_tokens: int = MAX_NEW_TOKENS,
        on_overflow: Overflow = "error",
    ) -> Assembled:
        """Lay a prompt out for the stock `generate()` of transformers: `assembled.generate(max_new_tokens=64)`.

        Args:
            max_new_tokens: Positions to leave free in the context; generate is told its own number.
        """
        request = self._asking.request(
            docs, question, system=system, labels=labels, room=max_new_tokens, on_overflow=on_overflow
        )
        return self._assembling.assembled(request, labels=labels)

    def prefetch(self, docs: Sequence[DocumentLike], question: str | None = None, *, priority: int = 0) -> Prefetch:
        """Load what a later request about these documents will need, in the background; returns at once.

        What the store does not have is left to the request. Cancel the handle if the request never comes.

        Args:
            docs: Texts, Documents, or mappings with `text` and perhaps `title`.
            question: Checks that the request will fit the context, as `generate` does.
            priority: The greatest is loaded first.
        """
        if question is None:
            segments = self._asking.segments(docs)
        else:
            segments = self._asking.request(docs, question).prompt.segments
        return self.loader.prefetch(segments, priority)

    def submit(self, job: Job) -> None:
        """Let a job of this engine wait for its turn; whoever reads it drives the steps, unless `start` was called.

        Raises:
            QueueFull: So many wait that no other is taken.
            InputError: Documents are assembled for each prompt here, and nothing goes on beside it; or the job is none
                of an engine.
        """
        if not isinstance(job, Task):
            raise InputError("this job was not made by Engine.job, so there is nothing to do for it")
        self._steps.submit(job)

    def step(self) -> bool:
        """Admit, load, run, sample, hand over: one forward for all that is under way; whether there was anything."""
        return self._steps.step()

    def call(self, function: Callable[[], Found]) -> Future[Found]:
        """Let a function run between two steps, in the thread that `start` began; at once without one."""
        return self._steps.call(function)

    def stats(self) -> SchedulerStats:
        """Return what goes on, and what happened since the beginning."""
        return self._steps.scheduler.stats()

    def start(self) -> None:
        """Let a thread of its own run the steps from now on."""
        self._steps.start()

    def stop(self, *, drain: bool = True) -> None:
        """End that thread, when nothing is left to do; with `drain=False` at once, giving up what is under way."""
        self._steps.stop(drain=drain)

    @property
    def _steps(self) -> Worker:
        if self._worker is None:
            raise InputError(
                "this engine assembles documents for each prompt and answers one request at a time: use generate or "
                'stream, or load it with attention="shared"'
            )
        return self._worker

    def over(
        self, loader: Loader, *, uses: Callable[[str], bool] = lambda _: True, asker: bytes | None = None
    ) -> "Engine":
        """Return an engine for other documents: the same model, device tier and known beginnings, another loader.

        Args:
            loader: Of the same model; its scope shares nothing with others.
            uses: Whether a document's name is used; what is not does not stay on the device.
            asker: The scope of who asks, whose known beginnings are nobody else's; that of the documents if None.
        """
        sessions = self.sessions
        if sessions is not None:
            root = (*sessions.root[:-1], (loader.identity.scope if asker is None else asker).hex())
            sessions = sessions.over(sessions.residency.over(loader, uses=uses), root=root)
        return Engine(
            runner=self.runner,
            prompter=self._prompter,
            loader=loader,
            report=self.report,
            end_ids=self._end_ids,
            links=self.assembler.links,
            adapter=self.assembler.adapter,
            sessions=sessions,
            worker=self._worker,
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
