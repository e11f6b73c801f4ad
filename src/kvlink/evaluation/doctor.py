"""Whether reuse is good enough for somebody's own documents and questions, in words: what differs, what is saved.

The configured method is held to full attention on the same rows. It is called worse only where that is measured: both
thresholds lie outside of the 95 % intervals. Then what could be changed is measured on the same rows, too.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvlink.core.document import Document
from kvlink.core.errors import InputError, KVLinkError
from kvlink.corpus import best_documents
from kvlink.evaluation.case import Bench, Case
from kvlink.evaluation.evaluate import Limits, evaluate, summarise
from kvlink.evaluation.methods.full import Full
from kvlink.models.bundle import shipped_for
from kvlink.store.codecs import CODECS, RAW
from kvlink.training.data import QUESTION, Row
from kvlink.training.pieces import chunked
from kvlink.training.selfstudy import Generate, Study, self_study

AGREEMENT, NLL = 0.95, 0.02
"""As good as full attention is a method that says the same at this share of tokens, or whose answer is no more than
this many nats per token less likely."""

ANSWER_TOKENS = 32
"""Longest answer that full attention gives to a question without a right one."""

PIECE_TOKENS = 512
"""A longer document is cut into pieces, each a document."""

PER_QUESTION = 20
"""Documents of a large corpus that are looked at for each question that a model writes."""

Verdict = Literal["as good", "not measurably worse", "measurably worse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How documents are reused.

    Attributes:
        links: A bundle, `auto` for the one that ships for the model, or `none`.
        foreign: Take a bundle of other weights of the same shape.
        codec: What entries are kept in.
        sink: The sink prefix, where no bundle says it.
    """

    links: str = "auto"
    foreign: bool = False
    codec: str = RAW
    sink: str = "header"

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise InputError(f"there is no codec {self.codec!r}; there are {', '.join(CODECS)}")

    def method(self, digest: str) -> str:
        """Return the method that this is, for a model of this digest."""
        if not self.has_links(digest):
            return f"concat_reencoded(sink={self.sink}, codec={self.codec})"
        foreign = ", foreign=yes" if self.foreign else ""
        return f"kvlink(bundle={self.links}, codec={self.codec}{foreign})"

    def has_links(self, digest: str) -> bool:
        """Whether link tokens would be used."""
        return self.links != "none" and (self.links != "auto" or shipped_for(digest) is not None)

    def changes(self, digest: str) -> Iterator[tuple[str, "Setup"]]:
        """Yield what could be changed without training, and what it would be then."""
        if self.links == "none" and shipped_for(digest) is not None:
            yield "take the link tokens that ship for this model (--links auto)", replace(self, links="auto")
        if self.codec != RAW:
            yield "keep entries as they are (--codec raw)", replace(self, codec=RAW)
        if self.sink != "header" and not self.has_links(digest):
            yield "encode behind the chat template's header (--sink header)", replace(self, sink="header")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        saves: Shares of `tokens` and `ttft` that are not spent, `ttft_s` (seconds of both), `bytes` read per question.
        advice: What to do, in sentences.
        results: The summary of all methods that ran; the configured one has verdict, saves and advice.
    """

    verdict: Verdict
    words: str
    saves: Mapping[str, float]
    advice: tuple[str, ...]
    results: tuple[dict[str, Any], ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing worse than full attention was measured."""
        return self.verdict != "measurably worse"


def asked_rows(
    questions: Sequence[tuple[str, tuple[str, ...]]], documents: Sequence[Document], *, top: int
) -> list[Row]:
    """Return a row per question with the documents that fit it best.

    Args:
        questions: Each with its right answers, if there are any.

    Raises:
        InputError: No document holds text.
    """
    pieces = [piece for one in documents if not one.is_blank for piece in chunked(one, PIECE_TOKENS)]
    if not pieces:
        raise InputError(f"none of {len(documents)} documents holds any text; give a folder of texts")
    return [
        Row(f"question-{number}", question, tuple(best_documents(pieces, question, top=top)), answers)
        for number, (question, answers) in enumerate(questions, start=1)
    ]


def studied_rows(
    documents: Sequence[Document], generate: Generate, *, number: int, top: int, max_tokens: int, seed: int = 0
) -> list[Row]:
    """Return rows whose questions the model has written about the documents itself.

    Of a large corpus a part is looked at, which follows from the seed.

    Raises:
        InputError: No document holds text, or nothing could be asked.
    """
    most = PER_QUESTION * number
    looked = random.Random(seed).sample(list(documents), most) if len(documents) > most else documents  # noqa: S311
    piece = min(PIECE_TOKENS, max_tokens)
    study = Study(fewest=top, most=top, fewest_questions=1, most_questions=1, max_tokens=max_tokens, piece_tokens=piece)
    found = self_study(looked, generate, number=number, study=study, name="doctor", seed=seed)
    before, after = QUESTION.split("{question}")
    rows: list[Row] = []
    for example in found.examples:
        (question,) = example.questions
        own = question.text.startswith(before) and question.text.endswith(after)
        text = question.text[len(before) : -len(after)] if own else question.text
        rows.append(Row(example.id, text, example.documents, (question.answer,) if own else ()))
    return rows


def diagnose(
    bench: Bench,
    rows: Sequence[Row],
    setup: Setup,
    *,
    max_tokens: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Diagnosis:
    """Hold the configured method to full attention.

    A row without a right answer is scored on what full attention answers.

    Args:
        max_tokens: Of a prompt; documents are left out from the back.
        progress: Called after each row.

    Raises:
        InputError: Nothing could be scored; the message says why.
    """
    limits = Limits(max_tokens=max_tokens)
    scored = [_answered(bench, row, max_tokens) for row in rows]
    configured = setup.method(bench.digest)
    full, own = _measured(bench, scored, ["full", configured], limits, progress)
    if not own["n"]:
        raise InputError(f"nothing could be scored: {'; '.join(own.get('errors', ['no question got an answer']))}")
    verdict = verdict_of(own)
    saves = saves_of(full, own)
    others: list[tuple[str, dict[str, Any]]] = []
    if verdict == "measurably worse":
        for what, changed in setup.changes(bench.digest):
            others += [(what, row) for row in _measured(bench, scored, [changed.method(bench.digest)], limits)]
    advice = advice_of(own, verdict, others, has_links=setup.has_links(bench.digest), codec=setup.codec)
    own |= {"verdict": verdict, "saves": saves, "advice": list(advice)}
    words = words_of(own, verdict, saves)
    return Diagnosis(verdict, words, saves, advice, (full, own, *(row for _, row in others)))


def verdict_of(own: Mapping[str, Any]) -> Verdict:
    """Return what the thresholds, and the intervals around what was measured, say."""
    agreement, nll = own["against_full"]["agreement"], own["against_full"]["nll"]
    if own["agreement"] >= AGREEMENT or nll["difference"] <= NLL:
        return "as good"
    return "not measurably worse" if 1 + agreement["high"] >= AGREEMENT or nll["low"] <= NLL else "measurably worse"


def saves_of(full: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, float]:
    """Return what reuse saves."""
    return {
        "tokens": 1 - own["tokens_computed"] / full["tokens_computed"],
        "ttft": 1 - own["ttft_s"] / full["ttft_s"],
        "ttft_s": own["ttft_s"],
        "full_ttft_s": full["ttft_s"],
        "bytes": own["bytes_loaded"],
    }


def words_of(own: Mapping[str, Any], verdict: Verdict, saves: Mapping[str, float]) -> str:
    """Return the diagnosis in plain words."""
    agreement, nll = own["against_full"]["agreement"], own["against_full"]["nll"]
    heads = {
        "as good": "As good as full attention on these documents.",
        "not measurably worse": "Not measurably worse than full attention; more questions would tell.",
        "measurably worse": "Measurably worse than full attention on these documents.",
    }
    likely = "less" if nll["difference"] >= 0 else "more"
    return (
        f"{heads[verdict]} It says the same at {own['agreement']:.1%} of the answers' tokens (95 % interval "
        f"{max(0.0, 1 + agreement['low']):.1%} to {min(1.0, 1 + agreement['high']):.1%}, {AGREEMENT:.0%} is asked for) "
        f"and the answers are {abs(nll['difference']):.3f} nats per token {likely} likely ({nll['low']:+.3f} to "
        f"{nll['high']:+.3f}, {NLL:g} is allowed), over {own['n']} questions. It computes {saves['tokens']:.0%} fewer "
        f"tokens; the first one comes after {saves['ttft_s']:.2f} s instead of {saves['full_ttft_s']:.2f} s, and "
        f"{saves['bytes'] / 1e6:.1f} MB of entries are read for a question."
    )


def advice_of(
    own: Mapping[str, Any],
    verdict: Verdict,
    others: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    has_links: bool,
    codec: str,
) -> tuple[str, ...]:
    """Return what to do.

    Args:
        others: What could be changed, with what was measured then.
    """
    if verdict == "as good":
        more = " Entries take less in int8 (--codec int8); ask again with it." if codec == RAW else ""
        return (f"Nothing has to change.{more}",)
    advice: list[str] = []
    if verdict == "not measurably worse":
        advice.append("Ask more questions (--limit), so that the intervals become narrower.")
    for what, row in sorted((pair for pair in others if pair[1]["n"]), key=lambda pair: pair[1]["kl"]):
        if row["kl"] < own["kl"]:
            good = "as good as full attention" if verdict_of(row) == "as good" else "nearer"
            advice.append(
                f"{what[0].upper()}{what[1:]}: then it is {good}, {row['agreement']:.1%} instead of "
                f"{own['agreement']:.1%} of the tokens."
            )
    if not has_links:
        advice.append(
            "Train link tokens on these documents: kvlink train links --corpus FOLDER --out FILE, then --links FILE."
        )
    elif verdict == "measurably worse":
        advice.append(
            "Train link tokens on these very documents, and compare their number: kvlink train sweep --corpus FOLDER "
            "--counts 4,6,8 --out FILE, then --links FILE."
        )
    if verdict == "measurably worse":
        advice.append("Until then, answer such questions by full attention (`reuse=False` in Python).")
    return tuple(advice)


def _answered(bench: Bench, row: Row, max_tokens: int | None) -> Row:
    """Return a row with an answer: its own, or what full attention says."""
    if row.answers:
        return row
    try:
        case = Case(bench, row, max_tokens=max_tokens)
        limit = min(ANSWER_TOKENS, bench.context - case.prompt.num_tokens)
        ids = Full().generate(case, limit=limit, end_ids=bench.prompter.end_ids) if limit > 0 else ()
    except KVLinkError:  # such as a blank question; scoring tells it
        return row
    text = bench.prompter.decode(ids).strip()
    return replace(row, answers=(text,)) if text else row


def _measured(
    bench: Bench,
    rows: list[Row],
    methods: Sequence[str],
    limits: Limits,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return the summary of methods; `full` has to be among them, or be named again."""
    asked = list(dict.fromkeys(["full", *methods]))
    found: list[dict[str, Any]] = []
    for results in evaluate(bench, {"own": rows}, asked, limits=limits):
        found += results
        progress()
    summary = {row["method"]: row for row in summarise(found)}
    return [summary[method] for method in methods]
