"""The training loop: AdamW over lessons, held-out divergence, early stop, and a state that survives a kill.

The order of lessons follows from seed and epoch alone, so a resumed run repeats the curve of one that never stopped.
Knows no files but its own folder, and no text.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvlink.core.errors import InputError, TrainingDiverged
from kvlink.training import losses
from kvlink.training.lesson import Lesson
from kvlink.training.state import State, forget_state, read_state, write_state
from kvlink.training.student import Student
from kvlink.training.teacher import Teacher

MAX_BAD_STEPS = 3
"""Steps in a row without a finite loss after which training stops."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. All of it stands in the card of the bundle.

    Attributes:
        epochs: Times that each lesson is seen.
        batch: Lessons of one step.
        lr: Peak learning rate of link tokens.
        lr_adapter: Peak learning rate of everything else.
        warmup: Share of the steps in which the rate rises; it falls along a cosine behind them.
        clip: Largest norm of the gradient.
        weight_decay: AdamW's, for all but the link tokens.
        answer: Share of the loss that is the right ids' likelihood; the rest is the distance to the teacher.
        question: Weight of the question's own rows, where those of the answer weigh 1.
        every: Steps between two looks at the held-out lessons.
        patience: Looks without a better held-out divergence after which training stops; None for never.
    """

    epochs: int = 3
    batch: int = 4
    lr: float = 0.01
    lr_adapter: float = 1e-3
    warmup: float = 0.05
    clip: float = 1.0
    weight_decay: float = 0.0
    answer: float = 0.0
    question: float = 0.0
    every: int = 25
    patience: int | None = 6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1 or self.every < 1 or not 0 <= self.answer <= 1 or self.question < 0:
            raise InputError(
                f"epochs {self.epochs}, batch {self.batch} and every {self.every} are at least 1, answer {self.answer} "
                f"lies between 0 and 1, question {self.question} is not negative"
            )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How far the student is from the teacher where it has not learned: means over answer tokens."""

    kl: float
    agreement: float


@dataclass(slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        reason: `finished`, `stopped early`.
        curve: `(step, held-out)` at every look.
        best: The step whose parameters the student holds now.
        bad_steps, bad_in_a_row: Steps without a finite loss, which changed nothing: in all, and just now.
        seconds: Of all its parts, where it was resumed.
    """

    steps: int = 0
    reason: Literal["finished", "stopped early"] = "finished"
    loss: float = math.nan
    best: int = 0
    bad_steps: int = 0
    bad_in_a_row: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, HeldOut]] = field(default_factory=list)


Progress = Callable[[int, int, float, float], None]
"""Told after each step: step, steps in all, loss, held-out divergence so far."""


def held_out(student: Student, teacher: Teacher, lessons: Sequence[Lesson]) -> HeldOut:
    """Return the mean divergence and agreement over the answer tokens of some lessons."""
    divergence = agreed = 0.0
    count = 0
    for lesson in lessons:
        with torch.no_grad():
            logits = student.logits(lesson)
        predicted, scored = teacher(lesson), lesson.rows().scored
        divergence += losses.distill(logits, predicted)[scored].sum().item()
        agreed += (logits.argmax(-1) == predicted.ids[:, 0].to(logits.device))[scored].sum().item()
        count += int(scored.sum())
    return HeldOut(divergence / count, agreed / count)


class Trainer:
    """Trains one student on lessons."""

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        *,
        lessons: Sequence[Lesson],
        held_out: Sequence[Lesson],
        recipe: Recipe,
        folder: Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Take who learns, who teaches, and what.

        Args:
            folder: Where metrics (`metrics.jsonl`) and the state are kept; None keeps nothing.
            settings: What else has to be the same for a run to be resumed, as JSON.

        Raises:
            InputError: There are no lessons, or none to look at.
        """
        if not lessons or not held_out:
            raise InputError(
                f"{len(lessons)} lessons and {len(held_out)} held-out ones: at least one of each is needed"
            )
        self.student, self.teacher, self.recipe = student, teacher, recipe
        self._lessons, self._held_out = list(lessons), list(held_out)
        self._folder = folder
        self._more = dict(settings or {})
        self._steps = recipe.epochs * math.ceil(len(lessons) / recipe.batch)
        links = [tensor for name, tensor in student.trained.items() if name == "links"]
        others = [tensor for name, tensor in student.trained.items() if name != "links"]
        groups: list[dict[str, Any]] = [{"params": links, "lr": recipe.lr, "weight_decay": 0.0}] if links else []
        if others:
            groups.append({"params": others, "lr": recipe.lr_adapter, "weight_decay": recipe.weight_decay})
        self._optimiser = torch.optim.AdamW(groups)
        self._peaks: list[float] = [group["lr"] for group in groups]

    def run(self, *, resume: bool = False, progress: Progress = lambda *_: None) -> Outcome:
        """Train to the end; the student then holds the parameters with the best held-out divergence.

        Args:
            resume: Go on from the state in the folder, if there is one of this very recipe; else it is forgotten.

        Raises:
            InputError: The folder's state belongs to another recipe or other lessons, or the folder cannot be written.
            TrainingDiverged: The loss was no number several times in a row.
        """
        outcome, best = Outcome(), self._copy()
        first = self._resumed(outcome, best) if resume else 0
        started = time.perf_counter() - outcome.seconds
        if not first:
            if self._folder is not None:
                forget_state(self._folder)
            self._log({"settings": self._settings()}, new=True)
            outcome.curve.append((0, self.look()))
            self._log({"step": 0, **asdict(outcome.curve[0][1])})
        for step, batch in enumerate(self._batches(first), start=first + 1):
            looks = [at for at, _ in outcome.curve if at > outcome.best]
            if self.recipe.patience is not None and len(looks) >= self.recipe.patience:
                outcome.reason = "stopped early"
                break
            rate = self._pace(step)
            loss, norm, tokens = self._step(batch)
            if math.isfinite(loss) and math.isfinite(norm):
                outcome.bad_in_a_row = 0
                outcome.loss = loss
            else:
                outcome.bad_in_a_row += 1
                outcome.bad_steps += 1
                if outcome.bad_in_a_row == MAX_BAD_STEPS:
                    raise TrainingDiverged(
                        f"the loss or its gradient was no number in {MAX_BAD_STEPS} steps in a row, the last one step "
                        f"{step} of {self._steps} (loss {loss}, gradient {norm}); the best parameters are those of "
                        f"step {outcome.best}. Lower --lr ({self.recipe.lr}), or look at the lessons "
                        f"{', '.join(lesson.id for lesson in batch)}"
                    )
            outcome.steps = step
            self._log({"step": step, "loss": loss, "norm": norm, "tokens": tokens, "lr": rate})
            if step % self.recipe.every == 0 or step == self._steps:
                found = self.look()
                if found.kl < min((seen.kl for _, seen in outcome.curve if math.isfinite(seen.kl)), default=math.inf):
                    outcome.best, best = step, self._copy()
                outcome.curve.append((step, found))
                self._log({"step": step, **asdict(found)})
                outcome.seconds = time.perf_counter() - started
                self._keep(outcome, best)
            progress(step, self._steps, loss, outcome.curve[-1][1].kl)
        self._restore(best)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def look(self) -> HeldOut:
        """Return how far the student is from the teacher on the held-out lessons."""
        return held_out(self.student, self.teacher, self._held_out)

    def _step(self, batch: Sequence[Lesson]) -> tuple[float, float, int]:
        """Learn from one batch; return the mean loss, the norm of the gradient and the rows that were scored."""
        recipe = self.recipe
        weights = [torch.where(rows.scored, 1.0, recipe.question) for rows in (lesson.rows() for lesson in batch)]
        whole = sum(float(weight.sum()) for weight in weights)
        self._optimiser.zero_grad()
        loss = 0.0
        for lesson, weight in zip(batch, weights, strict=True):
            logits = self.student.logits(lesson)
            per_row = losses.distill(logits, self.teacher(lesson)) * (1 - recipe.answer)
            if recipe.answer:
                per_row = per_row + recipe.answer * losses.answer(logits, lesson.rows().targets.to(logits.device))
            part = (per_row * weight.to(per_row)).sum() / whole
            part.backward()
            loss += part.item()
        parameters = list(self.student.trained.values())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, recipe.clip))
        if math.isfinite(loss) and math.isfinite(norm):
            self._optimiser.step()
        return loss, norm, int(whole)

    def _batches(self, first: int) -> Iterator[list[Lesson]]:
        """Yield the batches from step `first` on, each epoch in an order of its own."""
        size = self.recipe.batch
        per_epoch = math.ceil(len(self._lessons) / size)
        for step in range(first, self._steps):
            epoch, at = divmod(step, per_epoch)
            generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self._lessons), generator=generator)[at * size : (at + 1) * size]
            yield [self._lessons[index] for index in order.tolist()]

    def _pace(self, step: int) -> float:
        """Set the rates of a step, a linear rise to the peak and then a cosine towards zero; return that of links."""
        rising = max(1, round(self.recipe.warmup * self._steps))
        falling = max(1, self._steps - rising)
        share = step / rising if step <= rising else 0.5 * (1 + math.cos(math.pi * (step - 1 - rising) / falling))
        for group, peak in zip(self._optimiser.param_groups, self._peaks, strict=True):
            group["lr"] = share * peak
        return share * self._peaks[0]

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.student.trained.items()}

    def _restore(self, kept: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.student.trained.items():
                tensor.copy_(kept[name])

    def _settings(self) -> dict[str, Any]:
        """Return what must be the same for a run to go on."""
        shapes = {name: list(tensor.shape) for name, tensor in self.student.trained.items()}
        lessons = [lesson.digest()[:16] for lesson in (*self._lessons, *self._held_out)]
        return {"recipe": asdict(self.recipe), "trained": shapes, "lessons": lessons, **self._more}

    def _log(self, row: dict[str, Any], *, new: bool = False) -> None:
        if self._folder is None:
            return
        kept = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "metrics.jsonl").open("w" if new else "a", encoding="utf-8") as file:
                file.write(json.dumps(kept, allow_nan=False) + "\n")
        except OSError as error:
            raise InputError(f"the metrics cannot be written to {self._folder}: {error}") from error

    def _keep(self, outcome: Outcome, best: dict[str, Tensor]) -> None:
        if self._folder is not None:
            state = State(self._copy(), best, self._optimiser.state_dict(), asdict(outcome), self._settings())
            write_state(self._folder, state)

    def _resumed(self, outcome: Outcome, best: dict[str, Tensor]) -> int:
        """Take up the folder's state; return the steps that it has behind it."""
        state = read_state(self._folder, self._settings()) if self._folder is not None else None
        if state is None:
            return 0
        self._restore(state.now)
        best.update(state.best)
        self._optimiser.load_state_dict(state.optimiser)
        kept = state.outcome
        outcome.steps, outcome.loss, outcome.best = kept["steps"], kept["loss"], kept["best"]
        outcome.bad_steps, outcome.bad_in_a_row = kept["bad_steps"], kept["bad_in_a_row"]
        outcome.seconds = kept["seconds"]
        outcome.curve = [(step, HeldOut(**seen)) for step, seen in kept["curve"]]
        self._truncate(outcome.steps)
        return outcome.steps

    def _truncate(self, steps: int) -> None:
        """Forget the metrics of steps that will be taken once more, and of one that a kill has torn."""
        assert self._folder is not None, "there was a state in it"
        file = self._folder / "metrics.jsonl"
        rows = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        kept = [row for row in rows if row.endswith("\n") and json.loads(row).get("step", 0) <= steps]
        file.write_text("".join(kept), encoding="utf-8")
