"""The teacher: the frozen model's own full attention on the same ids, computed once and kept.

S and the documents take one causal forward, whatever the number of questions behind them.
"""

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from kvlink.core.errors import InputError
from kvlink.models.assembler import Assembler
from kvlink.models.branches import Past, Rows, branch_logits
from kvlink.models.runner import Runner
from kvlink.training.lesson import Lesson
from kvlink.training.losses import TOP, TopLogits

BUDGET_BYTES = 4 << 30
"""Bytes of kept predictions above which further ones are computed anew each time."""


class Teacher:
    """Predicts what full attention would; remembers it in a folder, or not at all, or once and for all (`learn`).

    Attributes:
        computed, known: Lessons that were computed, and that were kept from before.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        model: str,
        folder: Path | None = None,
        budget_bytes: int = BUDGET_BYTES,
        top: int = TOP,
    ) -> None:
        """Take a model and its digest (hex)."""
        self.computed = self.known = 0
        self._assembler = Assembler(runner)
        self._runner = runner
        self._model = model
        self._top = top
        self._folder = folder
        self._left = budget_bytes
        self._learned: dict[str, TopLogits] = {}
        self._frozen = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._left -= sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def __call__(self, lesson: Lesson) -> TopLogits:
        """Return the teacher's predictions at all rows behind the documents."""
        file = self._file(lesson)
        found = self._learned.get(lesson.digest()) or (_read(file, self._runner.device) if file else None)
        if found is not None and len(found.ids) == len(lesson.rows().ids):
            self.known += 1
            return found
        found = self.compute(lesson)
        self.computed += 1
        if file:
            self._keep(file, save({"ids": found.ids.int().cpu(), "logprobs": found.logprobs.cpu()}))
        return found

    def learn(self, lessons: Iterable[Lesson], *, done: Callable[[], None] = lambda: None) -> None:
        """Compute and keep the predictions for these lessons, and compute none from then on.

        Called before the model's own weights change, behind which it would be a teacher no more. What the folder has
        no room for is kept in memory.

        Args:
            done: Called after each lesson.
        """
        for lesson in lessons:
            found, file = self(lesson), self._file(lesson)
            if file is None or not file.exists():
                self._learned[lesson.digest()] = found
            done()
        self._frozen = True

    def compute(self, lesson: Lesson) -> TopLogits:
        """Compute them: S and documents causally, then all questions side by side.

        Raises:
            InputError: The teacher has finished learning, and may not be the model that it was.
        """
        if self._frozen:
            raise InputError(
                f"the teacher's predictions for lesson {lesson.id} are not among those that were kept before training "
                "began, and the model has changed since: let Teacher.learn see all lessons, and leave its folder alone"
            )
        layout = lesson.prompt.layout()
        with torch.inference_mode():
            cache, _ = self._assembler.prefill_plain(lesson.prompt, upto=len(layout) - len(lesson.prompt.tail))
            rows = lesson.rows()
            logits = branch_logits(
                self._runner,
                Past.of_cache(cache),
                Rows(self._assembler.embed(rows.ids), rows.offsets + cache.length, rows.branches),
                keep=torch.arange(len(rows.ids)),
            )
            found = TopLogits.of(logits, top=self._top)
        self._assembler.release(cache)
        return TopLogits(found.ids.clone(), found.logprobs.clone())  # usable where gradients flow

    def _keep(self, file: Path, data: bytes) -> None:
        """Write what there is room for; what cannot be kept is computed anew each time."""
        left = self._left + (file.stat().st_size if file.exists() else 0)  # a damaged one makes room
        if len(data) <= left and _write(file, data):
            self._left = left - len(data)

    def _file(self, lesson: Lesson) -> Path | None:
        name = f"{lesson.digest()[:40]}-{self._model[:16]}-{self._top}.safetensors"
        return self._folder / name if self._folder else None


def _read(file: Path, device: torch.device) -> TopLogits | None:
    """Return what a file holds, or None if there is none that can be read: then it is computed again."""
    try:
        tensors = load(file.read_bytes())
        return TopLogits(tensors["ids"].to(device).long(), tensors["logprobs"].to(device))
    except (OSError, SafetensorError, KeyError):
        return None


def _write(file: Path, data: bytes) -> bool:
    """Write a file, whole or not at all; return whether it could be written."""
    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            (Path(folder) / file.name).write_bytes(data)
            os.replace(Path(folder) / file.name, file)  # noqa: PTH105 (one call, atomic)
    except OSError:
        return False
    return True
