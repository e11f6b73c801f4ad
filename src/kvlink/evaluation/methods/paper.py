"""`paper`: the prompt of the checkpoints that were published with the paper, read as they were trained.

    S <MEM_START> | D_1 | links of slot 0 | D_2 | links of slot 1 | ... | D_N | links of slot N - 1 <MEM_END> T

Each slot has link tokens of its own, ids of the vocabulary that the checkpoint has learned; documents carry their rank
and stand behind no sink prefix. So the ids are not those of the other methods: differences from `full` are to be read
with care, answers and their scores are not.

Source: arXiv 2502.16002 (KVLink); ids and form of its public checkpoints for Llama 3.2.
"""

from typing import ClassVar

from kvlink.core.document import clean
from kvlink.core.entry import CacheEntry
from kvlink.core.errors import InputError, ModelRefused
from kvlink.core.layout import Prompt
from kvlink.evaluation.case import Case, Ids
from kvlink.evaluation.methods.base import Method, Prefilled, whole_number

FIRST_LINK = 128011
"""Id of the first link token of slot 0."""

SLOTS = 40
"""Documents at most; the last 20 slots have not been trained."""

MEM_START, MEM_END = 128254, 128255
"""Ids around all documents."""


class Paper(Method):
    """Documents encoded alone, with link tokens of the checkpoint's own vocabulary behind each."""

    takes: ClassVar[tuple[str, ...]] = ("K",)

    def __init__(self, *, K: str = "5") -> None:  # noqa: N803 (as published)
        """Take K, the link tokens of a slot; the published checkpoints have 1 or 5 of them, or none."""
        self.num_links = whole_number(K, "K")
        if FIRST_LINK + self.num_links * SLOTS > MEM_START:
            raise InputError(f"K={K}: {SLOTS} slots of {K} ids each do not fit between {FIRST_LINK} and {MEM_START}")
        self._read: tuple[Case, list[CacheEntry], int] | None = None

    @property
    def facts(self) -> dict[str, int | str]:
        """K."""
        return {"links": self.num_links}

    def prompt(self, case: Case, tail: Ids) -> Prompt:
        """Return the row's ids in this form; links are the labels of the document behind them.

        Raises:
            ModelRefused: The model's vocabulary ends before these ids.
            InputError: There are more documents than slots.
        """
        vocabulary = case.bench.runner.embedding.num_embeddings
        if vocabulary <= MEM_END:
            raise ModelRefused(f"the vocabulary ends at {vocabulary - 1}, this form needs {MEM_END}: take a Llama 3")
        plain, documents = case.bench.prompter.plain_ids, case.documents
        if len(documents) > SLOTS:
            raise InputError(f"{len(documents)} documents, but there are {SLOTS} slots: pass --max-documents {SLOTS}")
        texts = [
            f"Document [{number}](Title: {clean(document.title)}) {clean(document.text)}\n"
            for number, document in enumerate(documents, start=1)
        ]
        links = [self.links(slot) for slot in range(len(documents))]
        return Prompt(
            (*case.prompt.system, MEM_START),
            tuple((plain(text),) for text in texts),
            (*(links[-1] if links else ()), MEM_END, *tail),
            ((), *links[:-1]) if links else (),
        )

    def links(self, slot: int) -> Ids:
        """Return the ids of a slot's link tokens."""
        first = FIRST_LINK + self.num_links * slot
        return tuple(range(first, first + self.num_links))

    def prepare(self, case: Case) -> None:
        """Encode the documents, and what stands before them."""
        prompt = self.prompt(case, case.prompt.tail)
        self._entries(case, prompt)
        case.bench.prefix(prompt.system)

    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Lay out what is known and compute links and T."""
        prompt = self.prompt(case, tail)
        layout, prefix = prompt.layout(), case.bench.prefix(prompt.system)
        entries, loaded = self._entries(case, prompt)
        assert prefix is not None, "S is never empty"
        cache = case.bench.assembler.assemble(layout, prefix=prefix, entries=entries, room=room)
        logits = case.bench.assembler.prefill(cache, prompt, layout, logits_to_keep=keep)
        computed = len(prompt.tail) + sum(map(len, prompt.labels))
        return Prefilled(logits, computed, loaded, cache)

    def _entries(self, case: Case, prompt: Prompt) -> tuple[list[CacheEntry], int]:
        if self._read is None or self._read[0] is not case:
            self._read = case, *case.read(case.bench.runner.encode(prompt.segments) if prompt.segments else [])
        return self._read[1:]
