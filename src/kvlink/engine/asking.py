"""From a question about documents to a task: ids that fit the context, and how the answer's tokens are chosen."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from kvlink.core.layout import Ids, Turn
from kvlink.engine.detokeniser import Detokeniser
from kvlink.engine.grammar import Grammar, Matcher
from kvlink.engine.request import DocumentLike, Order, Overflow, Request, as_documents, build_request, plain_request
from kvlink.engine.sampling import MAX_NEW_TOKENS, Sampler, SamplingParams
from kvlink.engine.session import Sessions
from kvlink.engine.task import Task
from kvlink.engine.usage import Timings
from kvlink.models.prompt import Prompter


def params_of(
    sampling: SamplingParams | None, *, max_new_tokens: int | None, stop: str | Sequence[str]
) -> SamplingParams:
    """Join what a caller says of sampling with what is said beside it: another length, further stop strings."""
    asked = sampling or SamplingParams()
    further = (stop,) if isinstance(stop, str) else tuple(stop)
    room = asked.max_new_tokens if max_new_tokens is None else max_new_tokens
    return replace(asked, max_new_tokens=room, stop=(*asked.stop, *further))


class Asking:
    """Reads questions for one model.

    Args:
        sessions: Of the scope that documents belong to; None in an assembled engine.
        end_ids: Ids that end an answer.
        vocab: How many logits the model gives.
        context: Positions that it accepts.
        num_links: K.
        cut: Whether a long document becomes several segments.
    """

    def __init__(
        self,
        prompter: Prompter,
        *,
        sessions: Sessions | None,
        end_ids: frozenset[int],
        vocab: int,
        context: int,
        num_links: int,
        cut: bool,
    ) -> None:
        self._prompter, self._sessions, self._end_ids = prompter, sessions, end_ids
        self._vocab, self._context, self._num_links, self._cut = vocab, context, num_links, cut
        self._grammar: Grammar | None = None

    def segments(self, docs: Sequence[DocumentLike]) -> tuple[Ids, ...]:
        """Return the segments of documents, those of blank ones left out."""
        documents = [document for document in as_documents(docs) if not document.is_blank]
        return tuple(ids for document in documents for ids in self._prompter.segments(document, cut=self._cut))

    def request(
        self,
        docs: Sequence[DocumentLike],
        question: str,
        *,
        system: str | None = None,
        labels: bool = False,
        room: int = MAX_NEW_TOKENS,
        on_overflow: Overflow = "error",
        history: Sequence[Turn] = (),
    ) -> Request:
        """Turn a request into ids; arguments and errors as those of `build_request`."""
        return build_request(
            self._prompter,
            docs,
            question,
            system=system,
            labels=labels,
            num_links=self._num_links,
            cut=self._cut,
            room=room,
            context=self._context,
            on_overflow=on_overflow,
            history=history,
        )

    def plain(self, text: str, *, room: int) -> Request:
        """Turn a text into the ids of a prompt without a chat template; errors as those of `plain_request`."""
        return plain_request(self._prompter, text, room=room, context=self._context)

    def task(
        self,
        request: Request,
        params: SamplingParams,
        *,
        order: Order,
        reuse: bool,
        labels: bool,
        deadline_s: float | None,
        start: float,
    ) -> Task:
        """Return what an engine can work on.

        Args:
            order, reuse, labels, deadline_s: As in `Engine.job`.
            start: When the request arrived (`perf_counter`).
        """
        return Task(
            request,
            Sampler(params, end_ids=self._end_ids, matcher=self._matcher(params)),
            Detokeniser(self._prompter.decode, params.stop),
            self._sessions,
            end_ids=self._end_ids,
            order=order,
            reuse=reuse,
            labels=labels,
            deadline=None if deadline_s is None else start + deadline_s,
            start=start,
            times=Timings(tokenise_s=perf_counter() - start),
        )

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        if params.json_schema is None:
            return None
        if self._grammar is None:  # compiles the vocabulary: only for those who ask
            self._grammar = Grammar(self._prompter.tokenizer, vocab=self._vocab, end_ids=self._end_ids)
        return self._grammar.matcher(params.json_schema)
