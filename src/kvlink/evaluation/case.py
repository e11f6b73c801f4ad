"""One row as all methods see it: the same ids, entries that are encoded once per sink prefix and shared."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from kvlink.core.document import Document
from kvlink.core.entry import CacheEntry
from kvlink.core.errors import InputError
from kvlink.core.layout import Prompt
from kvlink.engine.batches import batches
from kvlink.models.assembler import Assembler
from kvlink.models.cache import Prefix, SlotCache
from kvlink.models.prompt import Prompter
from kvlink.models.pruning import require_prunable
from kvlink.models.runner import Runner
from kvlink.store.codecs import CODECS, RAW, Codec
from kvlink.store.codecs.base import geometry_of
from kvlink.training.data import Row

Ids = tuple[int, ...]


@dataclass(slots=True)
class Bench:
    """What all rows of a run share: a model without link tokens, its prompts, its sink prefixes.

    Attributes:
        context: Positions that the model accepts.
        digest: Of the model (hex); bundles are held to it.
        assembler: The base model, K = 0.
        prefixes: Keys and values of sink prefixes and of S, by their ids.
        prunable: Whether the model was found to attend pruned documents.
    """

    runner: Runner
    prompter: Prompter
    context: int
    digest: str = ""
    assembler: Assembler = field(init=False)
    prefixes: dict[Ids, Prefix | None] = field(default_factory=dict)
    prunable: bool = False

    def __post_init__(self) -> None:
        self.assembler = Assembler(self.runner)

    def prefix(self, ids: Ids) -> Prefix | None:
        """Return keys and values of a prompt's first ids, computed once."""
        if ids not in self.prefixes:
            self.prefixes[ids] = self.runner.prefix(ids)
        return self.prefixes[ids]

    def release(self, cache: SlotCache | None) -> None:
        """Take back a buffer that nobody reads any more."""
        if cache is not None:
            self.assembler.release(cache)

    def require_prunable(self) -> None:
        """Measure once whether the model can attend pruned documents.

        Raises:
            ModelRefused: It cannot.
        """
        if not self.prunable:
            require_prunable(self.runner)
            self.prunable = True

    def sink_ids(self, kind: str) -> Ids:
        """Return the ids of a sink prefix; `kind` is header, bos or none."""
        return self.prompter.sink_ids(kind)  # pyright: ignore[reportArgumentType] (an unknown kind is its error)


class Case:
    """A row's ids and entries.

    Attributes:
        prompt: The ids of S, the documents and T.
        scored: Ids of the first right answer and the end of the turn; empty without an answer.
        gold: Positions in the prompt of the documents that hold the answer, or None if that is not known.
        dropped: Documents that were left out to keep to a limit.
        over_limit: By how much the prompt exceeds what was asked for, though only gold documents are left: `documents`,
            `tokens` (answer included); empty where all limits hold.
        tokenise_s: Seconds it took to get the ids.
        codec: What entries go through before a method has them, as if they came from a store.
        read_any: Whether a method has read entries.
    """

    codec: Codec = CODECS[RAW]
    read_any = False

    def __init__(
        self, bench: Bench, row: Row, *, max_documents: int | None = None, max_tokens: int | None = None
    ) -> None:
        start = perf_counter()
        self.bench = bench
        self.row = row
        prompter = bench.prompter
        system, tail = prompter.system_ids(row.system), prompter.tail_ids(row.text)
        self.scored: Ids = prompter.answer_ids(row.answers[0]) if row.answers else ()
        documents = [(at, prompter.document_ids(d)) for at, d in enumerate(row.documents) if not d.is_blank]
        most = bench.context if max_tokens is None else min(max_tokens, bench.context)
        room = most - len(system) - len(tail) - len(self.scored)
        kept = within(documents, gold=row.gold or (), most=max_documents, room=room)
        self.gold = None if row.gold is None else [at for at, (place, _) in enumerate(kept) if place in row.gold]
        self.dropped = len(documents) - len(kept)
        self._places = [place for place, _ in kept]
        self._cut: tuple[tuple[Ids, ...], ...] | None = None
        self.prompt = Prompt(system, tuple((ids,) for _, ids in kept), tail)
        self.over_limit: dict[str, int] = {}
        if max_documents is not None and len(kept) > max_documents:
            self.over_limit["documents"] = len(kept) - max_documents
        if max_tokens is not None and (over := self.prompt.num_tokens + len(self.scored) - max_tokens) > 0:
            self.over_limit["tokens"] = over
        self.tokenise_s = perf_counter() - start
        self._entries: dict[Ids, dict[Ids, CacheEntry]] = {}

    @property
    def documents(self) -> list[Document]:
        """The documents of the prompt, as the row has them."""
        return [self.row.documents[place] for place in self._places]

    def entries(self, sink: Ids, *, cut: bool = False) -> list[CacheEntry]:
        """Return one entry per segment, encoded behind a sink prefix; once per row and prefix.

        Args:
            cut: Whether long documents are cut, as serving does with link tokens of two levels.
        """
        made = self._entries.setdefault(sink, {})
        segments = self.with_tail(self.prompt.tail, cut=cut).segments
        prefix = self.bench.prefix(sink)
        for batch in batches(ids for ids in dict.fromkeys(segments) if ids not in made):
            made |= {entry.token_ids: entry for entry in self.bench.runner.encode(batch, prefix=prefix)}
        return [made[ids] for ids in segments]

    def through(self, codec: Codec) -> "Case":
        """Return the same row, whose entries go through a codec; what has been encoded is shared."""
        other = copy.copy(self)
        other.codec = codec
        return other

    def read(self, entries: Sequence[CacheEntry]) -> tuple[list[CacheEntry], int]:
        """Return entries as a store in the row's codec would give them, and the bytes that they take there.

        Raises:
            InputError: The codec does not take one of them.
            ModelRefused: The codec leaves tokens out, and this model cannot attend so.
        """
        self.read_any = True
        if self.codec.prunes:
            self.bench.require_prunable()
        found = [through(self.codec, entry) for entry in entries]
        return [entry for entry, _ in found], sum(num_bytes for _, num_bytes in found)

    def with_tail(self, tail: Ids, *, cut: bool = False) -> Prompt:
        """Return the prompt with another T: its own and what has been generated, or is scored, behind it.

        Args:
            cut: Whether long documents are cut.
        """
        if not cut:
            return Prompt(self.prompt.system, self.prompt.documents, tail)
        if self._cut is None:
            read = self.bench.prompter.segments
            self._cut = tuple(read(self.row.documents[place], cut=True) for place in self._places)
        return Prompt(self.prompt.system, self._cut, tail)


def within(
    documents: Sequence[tuple[int, Ids]], *, gold: Sequence[int], most: int | None, room: int
) -> list[tuple[int, Ids]]:
    """Leave out documents from the back, never gold ones, until both limits hold or only gold ones are left.

    Args:
        documents: Position in the row and ids.
        gold: Positions that stay.
        most: Number of documents.
        room: Tokens of all documents together.
    """
    kept = list(documents)

    def over() -> bool:
        return (most is not None and len(kept) > most) or sum(len(ids) for _, ids in kept) > room

    for document in reversed(documents):
        if not over():
            break
        if document[0] not in gold:
            kept.remove(document)
    return kept


def through(codec: Codec, entry: CacheEntry) -> tuple[CacheEntry, int]:
    """Return what a codec makes of an entry, and the bytes that it takes packed.

    Raises:
        InputError: The codec does not take it.
    """
    try:
        packed = codec.pack(entry)
    except ValueError as error:
        raise InputError(f"an entry of {entry.num_tokens} tokens has no place in this codec: {error}") from error
    read = codec.unpack(packed, geometry=geometry_of(entry), dtype=entry.keys.dtype, token_ids=entry.token_ids)
    return read, sum(tensor.nbytes for tensor in packed.values())
