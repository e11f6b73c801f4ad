"""The quality gate of codecs: how often a model says the same over entries that went through a codec as over raw ones.

Each row's prompt is laid out twice, with raw entries and with those that a codec gives back. Both are scored on the
greedy continuation that the model writes over raw entries (teacher forcing): how often the most likely id is the same,
and how far the distributions are apart. Knows no store; the verdict is kept by `engine.gate`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from kvlink.core import scores
from kvlink.core.errors import InputError, KVLinkError
from kvlink.core.scores import Interval
from kvlink.engine.gate import Verdict
from kvlink.evaluation.case import Bench, Case
from kvlink.evaluation.methods.concat_reencoded import ConcatReencoded
from kvlink.training.data import Row

THRESHOLDS: Mapping[str, float] = MappingProxyType({"half": 0.99, "int8": 0.99, "int4": 0.97})
"""Least agreement with raw by codec."""

NEW_TOKENS = 32
"""Longest continuation of a row that is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured of one codec.

    Attributes:
        verdict: What the gate keeps; None where no row could be scored.
        lost: Mean difference of agreement from that of raw, which is 1, with its 95 % interval over rows.
        kl: Mean KL(raw || codec) over rows with its interval; that of raw is 0.
        size: Bytes of the entries in the codec over those of raw ones in the model's dtype, headers left out.
        errors: Why rows were not scored, each reason once.
    """

    codec: str
    verdict: Verdict | None
    lost: Interval | None
    kl: Interval | None
    size: float | None
    errors: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether readers may take this codec by default."""
        return self.verdict is not None and self.verdict.passed

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        found = asdict(self)
        return {**found, "passed": self.passed, "errors": list(self.errors)}


@dataclass(slots=True)
class _Scores:
    """One codec's scores, row by row."""

    agreement: list[float]
    kl: list[float]
    raw_bytes: int = 0
    codec_bytes: int = 0
    tokens: int = 0


def calibrate(
    bench: Bench,
    rows: Sequence[Row],
    *,
    thresholds: Mapping[str, float] = THRESHOLDS,
    new_tokens: int = NEW_TOKENS,
    max_tokens: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[Calibration]:
    """Return one calibration per codec.

    Args:
        bench: The model.
        rows: What is asked; answers are not used.
        thresholds: The codecs, and the least agreement of each.
        new_tokens: Longest continuation of a row.
        max_tokens: Documents are left out from the back of longer rows, never gold ones.
        progress: Called after each row.

    Raises:
        InputError: There is no such codec, or a threshold is no share.
    """
    if wrong := [f"{codec}={least}" for codec, least in thresholds.items() if not 0 <= least <= 1]:
        raise InputError(f"thresholds are shares from 0 to 1, not {', '.join(wrong)}")
    raw = ConcatReencoded()
    methods = {codec: ConcatReencoded(codec=codec) for codec in thresholds}
    found = {codec: _Scores([], []) for codec in thresholds}
    errors: dict[str, dict[str, None]] = {codec: {} for codec in thresholds}
    for row in rows:
        try:
            _score(bench, row, raw, methods, found, errors, new_tokens=new_tokens, max_tokens=max_tokens)
        except KVLinkError as error:  # such as a blank question, or a row beyond the model's context
            for reasons in errors.values():
                reasons[str(error)] = None
        progress()
    figures = blake3("".join(row.digest for row in rows).encode()).hexdigest(length=8)
    return [
        _calibration(codec, found[codec], thresholds[codec], figures=figures, errors=tuple(errors[codec]))
        for codec in thresholds
    ]


def _score(
    bench: Bench,
    row: Row,
    raw: ConcatReencoded,
    methods: Mapping[str, ConcatReencoded],
    found: Mapping[str, _Scores],
    errors: Mapping[str, dict[str, None]],
    *,
    new_tokens: int,
    max_tokens: int | None,
) -> None:
    """Add the scores of one row."""
    case = Case(bench, row, max_tokens=max_tokens)
    limit = min(new_tokens, bench.context - case.prompt.num_tokens)
    if limit < 1 or not case.prompt.documents:
        raise InputError(
            f"{row.id}: its {case.prompt.num_tokens} tokens leave no room to answer, or it has no document"
        )
    raw.prepare(case)
    own = raw.generate(case, limit=limit, end_ids=bench.prompter.end_ids)
    wanted = raw.score(case, own)
    bench.release(wanted.cache)
    for codec, method in methods.items():
        try:
            method.prepare(case)
            here = method.score(case, own)
        except KVLinkError as error:
            errors[codec][str(error)] = None
            continue
        bench.release(here.cache)
        kept = found[codec]
        kept.agreement.append(scores.agreement(wanted.logits, here.logits))
        kept.kl.append(scores.kl(wanted.logits, here.logits))
        kept.raw_bytes += wanted.bytes_loaded
        kept.codec_bytes += here.bytes_loaded
        kept.tokens += len(own)


def _calibration(codec: str, found: _Scores, threshold: float, *, figures: str, errors: tuple[str, ...]) -> Calibration:
    number = len(found.agreement)
    if not number:
        return Calibration(codec=codec, verdict=None, lost=None, kl=None, size=None, errors=errors)
    agreement, kl = sum(found.agreement) / number, sum(found.kl) / number
    return Calibration(
        codec=codec,
        verdict=Verdict(
            passed=agreement >= threshold,
            agreement=agreement,
            threshold=threshold,
            kl=kl,
            rows=number,
            tokens=found.tokens,
            figures=figures,
        ),
        lost=scores.paired_interval(found.agreement, [1.0] * number),
        kl=scores.paired_interval(found.kl, [0.0] * number),
        size=found.codec_bytes / found.raw_bytes,
        errors=errors,
    )
