"""One training run, from examples to a bundle, or to a model with a bundle of its own."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from blake3 import blake3
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.models.adapter import RANK, Adapter, attention_layers
from kvlink.models.bundle import Bundle, Card, check_bundle
from kvlink.models.prompt import Prompter
from kvlink.models.runner import Runner
from kvlink.training.example import Example
from kvlink.training.initialise import initial_links
from kvlink.training.lesson import Lesson, Lessons, Segments, lessons_of
from kvlink.training.packets import Packets
from kvlink.training.student import Load, RequestSide
from kvlink.training.teacher import Teacher
from kvlink.training.trainer import Outcome, Progress, Recipe, Trainer, held_out
from kvlink.training.whole import WholePrompt


@dataclass(frozen=True, slots=True)
class Base:
    """The model that links are trained for, and where its entries come from.

    Attributes:
        load: Holds the entries of segments; encodes those that no store has.
        name, digest: Of the model; stand in the card.
        sink_ids: What the entries were encoded behind.
    """

    runner: Runner
    prompter: Prompter
    load: Load
    name: str
    digest: str
    sink_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and on how much.

    Attributes:
        mode: `links`; `links+lora` adds an adapter on the request's side; `lora` and `full` change how documents are
            read, too, and so give another model; `packet` and `packet+sink` train soft tokens around documents, without
            and with the sink prefix before them.
        num_links, levels: K, and 2 where long documents are to be cut, else 1. For packets K soft tokens stand before a
            document and K behind it, and no document is cut.
        init: How links begin; see `initial_links`.
        held_out: Lessons that are looked at and not learned from.
        rows: Questions to learn from, of the first lessons that are not held out; None for all.
    """

    mode: str = "links"
    num_links: int = 6
    levels: int = 2
    init: str = "separator"
    rank: int = RANK
    held_out: int = 40
    rows: int | None = None

    @property
    def is_packet(self) -> bool:
        """Whether soft tokens around documents are trained: a rival, which no engine serves."""
        return self.mode in PACKET_MODES


PACKET_MODES = ("packet", "packet+sink")


def num_rows(lessons: Iterable[Lesson]) -> int:
    """Return the number of questions."""
    return sum(len(lesson.branches) for lesson in lessons)


def split(lessons: Sequence[Lesson], held_out: int, *, rows: int | None = None) -> tuple[list[Lesson], list[Lesson]]:
    """Return what is learned from and what is held out: the lessons whose ids hash lowest, whatever `rows` is.

    What shares a question and its answer with a held-out lesson is not learned from. The same words asked about other
    documents ("What are the documents about?") have another answer and are another question.

    Args:
        rows: Questions at least to learn from, those of the first lessons: a smaller number gives the beginning of a
            larger one. None for all.

    Raises:
        InputError: Too few lessons, or too few questions.
    """
    if len(lessons) < 2 * held_out or held_out < 1:
        raise InputError(f"{len(lessons)} lessons, {held_out} of them held out: at least twice as many are needed")
    ranked = sorted(lessons, key=lambda lesson: blake3(lesson.id.encode()).digest())
    kept_out = {id(lesson) for lesson in ranked[:held_out]}
    looked = [lesson for lesson in lessons if id(lesson) in kept_out]
    asked = {branch for lesson in looked for branch in lesson.branches}
    learned = [
        lesson
        for lesson in lessons
        if id(lesson) not in kept_out and not any(branch in asked for branch in lesson.branches)
    ]
    if rows is None:
        return learned, looked
    up_to = list(accumulate(len(lesson.branches) for lesson in learned))
    number = bisect_left(up_to, rows) + 1
    if rows < 1 or number > len(learned):
        raise InputError(f"{rows} rows to learn from: there are 1 to {num_rows(learned)} beside those held out")
    return learned[:number], looked


def lessons_for(base: Base, examples: Sequence[Example], plan: Plan, *, context: int) -> Lessons:
    """Return examples as ids, long documents cut where the plan has two levels.

    Args:
        context: Positions that the model accepts.
    """
    cut = plan.levels > 1 and not plan.is_packet
    segments: Segments = lambda document: base.prompter.segments(document, cut=cut)  # noqa: E731 (typed)
    return lessons_of(
        examples,
        prompter=base.prompter,
        segments=segments,
        num_links=plan.num_links * (2 if plan.is_packet else 1),
        context=context,
    )


def prepare(
    base: Base, teacher: Teacher, lessons: Sequence[Lesson], *, done: Callable[[], None] = lambda: None
) -> None:
    """Compute what every epoch reuses: the teacher's predictions and the documents' entries."""
    for lesson in lessons:
        teacher(lesson)
        with base.load(lesson.prompt.segments):
            pass
        done()


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What came of a run: the student as it was at its best, its card, how it went, and the questions learned from."""

    student: RequestSide | WholePrompt | Packets
    card: Card
    outcome: Outcome
    rows: int

    def bundle(self) -> Bundle:
        """Return link tokens and adapter; of no use in the modes that give another model."""
        return Bundle(self.student.links(), self.card, self.student.adapter())

    def save(self, out: Path, *, tokenizer: Any = None) -> None:
        """Write the bundle (or the soft tokens of packets) to a file, or the model with its bundle to a folder.

        Raises:
            InputError: It cannot be written.
        """
        if isinstance(self.student, WholePrompt):
            self.student.save(out, tokenizer=tokenizer, card=self.card)
        elif isinstance(self.student, Packets):
            self.student.wrapping(self.card).save(out)
        else:
            self.bundle().save(out)


def train(
    base: Base,
    teacher: Teacher,
    lessons: Sequence[Lesson],
    *,
    plan: Plan,
    recipe: Recipe,
    start: Bundle | None = None,
    folder: Path | None = None,
    resume: bool = False,
    progress: Progress = lambda *_: None,
) -> Trained:
    """Train on lessons.

    Args:
        start: A bundle whose links, and adapter if it has one, training begins with.
        folder: Keeps metrics and the state.
        resume: Go on from that state.
        progress: Told after each step.

    Raises:
        InputError: Too few lessons, another number of links to start with, or the folder holds another run.
        BundleRefused: The bundle to start with does not fit the model.
        TrainingDiverged: The loss was no number several times in a row.
    """
    if start is not None:
        require_start(base, start, plan)
    learned, looked = split(lessons, plan.held_out, rows=plan.rows)
    links = _links(base, learned, plan, recipe.seed) if start is None else start.links.embeddings
    without = held_out(RequestSide(base.runner, base.load, links=links[:, :0]), teacher, looked)
    student = _student(base, plan, links, start.adapter if start else None, seed=recipe.seed)
    if plan.mode == "full":
        teacher.learn([*learned, *looked])
    settings = {
        "model": base.digest,
        "sink_ids": list(base.sink_ids),
        "plan": asdict(plan),
        "start": None if start is None else start.digest,
    }
    trainer = Trainer(
        student, teacher, lessons=learned, held_out=looked, recipe=recipe, folder=folder, settings=settings
    )
    outcome = trainer.run(resume=resume, progress=progress)
    scores = dict(outcome.curve)[outcome.best]
    card = Card(
        model=base.name,
        digest=base.digest,
        sink_ids=base.sink_ids,
        template=base.prompter.template_version,
        mode=plan.mode,
        data=dict(Counter(lesson.source for lesson in learned)),
        steps=outcome.best,
        loss=f"KL to full attention, {recipe.answer:g} of it answers" if recipe.answer else "KL to full attention",
        scores={
            "kl": scores.kl,
            "agreement": scores.agreement,
            "kl_without": without.kl,
            "agreement_without": without.agreement,
            "held_out": len(looked),
        },
        recipe=asdict(recipe) | asdict(plan),
    )
    return Trained(student, card, outcome, num_rows(learned))


def require_start(base: Base, start: Bundle, plan: Plan) -> None:
    """Refuse a bundle that training cannot begin with. Links of another quantisation are a beginning, too.

    Raises:
        InputError: It has another number of links or levels than the plan, or an adapter that `links` would leave out.
        BundleRefused: It does not fit the model.
    """
    shapes = {name: layer.weight.shape for name, layer in attention_layers(base.runner.model)}
    hidden = base.runner.embedding.embedding_dim
    check_bundle(start, digest=start.card.digest, hidden=hidden, layers=shapes)
    if plan.is_packet:
        raise InputError("soft tokens of packets do not begin with a bundle of links: leave --start out")
    levels, num_links, _ = start.links.embeddings.shape
    if (levels, num_links) != (plan.levels, plan.num_links):
        raise InputError(
            f"the bundle to start with has {num_links} links in {levels} levels, asked for are {plan.num_links} in "
            f"{plan.levels}: ask for the same, or begin without it"
        )
    if start.adapter is not None and plan.mode in ("links", "full"):
        raise InputError(f"the bundle to start with holds an adapter, which {plan.mode} would lose: train links+lora")


def _links(base: Base, learned: Sequence[Lesson], plan: Plan, seed: int) -> Tensor:
    return initial_links(
        plan.init,
        runner=base.runner,
        prompter=base.prompter,
        documents=[ids for lesson in learned for ids in lesson.prompt.segments],
        num_links=plan.num_links,
        levels=2 if plan.is_packet else plan.levels,
        seed=seed,
    )


def _student(
    base: Base, plan: Plan, links: Tensor, adapter: Adapter | None, *, seed: int
) -> RequestSide | WholePrompt | Packets:
    if plan.is_packet:
        sink_ids = base.sink_ids if plan.mode == "packet+sink" else ()
        return Packets(base.runner, header=links[0], trailer=links[1], sink_ids=sink_ids)
    if plan.mode in ("links+lora", "lora") and adapter is None:
        adapter = Adapter.fresh(base.runner.model, rank=plan.rank, seed=seed)
    if plan.mode in ("links", "links+lora"):
        return RequestSide(base.runner, base.load, links=links, adapter=adapter)
    full = plan.mode == "full"
    return WholePrompt(base.runner, links=links, sink_ids=base.sink_ids, adapter=None if full else adapter, full=full)
