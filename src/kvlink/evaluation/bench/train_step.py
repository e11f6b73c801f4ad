"""One step of training link tokens: on stored documents, against one packed forward and backward over everything.

Both arms train the same parameters, links alone, by the same loss on the same lesson, and come to the same gradients;
what arm `links` needs besides (the documents' entries) lies on the disk, as does what the teacher predicts for both.
Time is taken in one process, arms in turn. Memory is measured in a fresh process for each arm.
"""

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from kvlink.core.layout import Prompt
from kvlink.engine.engine import Engine
from kvlink.engine.loader import Loader
from kvlink.evaluation.bench.texts import TEXT, document_of, question_of
from kvlink.evaluation.timing import alternate
from kvlink.models.links import LinkTokens
from kvlink.models.prompt import Prompter
from kvlink.store.base import Store
from kvlink.store.disk import DiskStore
from kvlink.training.lesson import Branch, Lesson
from kvlink.training.losses import distill
from kvlink.training.student import RequestSide, Student
from kvlink.training.teacher import Teacher
from kvlink.training.trainer import Recipe
from kvlink.training.whole import WholePrompt, WholeRows

Arm = Literal["links", "packed"]
ARMS: tuple[Arm, ...] = ("links", "packed")

MEMORY_STEPS = 2
"""Steps whose peak of memory counts."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step learns from.

    Attributes:
        documents, tokens: Documents, and tokens of each.
        question, answer: Tokens of the question (its own, about) and of the answer (exactly).
        links: K.
    """

    documents: int = 10
    tokens: int = 200
    question: int = 30
    answer: int = 10
    links: int = 6
    seed: int = 0

    def lesson(self, prompter: Prompter) -> Lesson:
        """Return made-up documents, a question and an answer of these lengths."""
        seeds = range(self.seed, self.seed + self.documents)
        documents = tuple((prompter.document_ids(document_of(prompter, self.tokens, seed=seed)),) for seed in seeds)
        tail = prompter.tail_ids(question_of(prompter, self.question))
        answer = (prompter.plain_ids(TEXT) * self.answer)[: self.answer]
        return Lesson("made-up", "bench", Prompt(prompter.system_ids(), documents, tail), (Branch(tail, answer),))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process.

    Attributes:
        loaded_bytes: Held before the first step: the model, and all that came with it.
        step_bytes: What steps took beyond that at their peak.
    """

    loaded_bytes: int
    step_bytes: int


class Step:
    """One step of an arm on one lesson, as often as it is called."""

    def __init__(self, engine: Engine, arm: Arm, work: Work, *, store: Store, folder: Path) -> None:
        """Prepare an arm.

        Args:
            store: Has the documents' entries, or gets them in the first step.
            folder: Has the teacher's predictions, or gets them in the first step.
        """
        runner, base = engine.runner, engine.loader
        links = LinkTokens.random(runner.embedding, num_links=work.links, seed=work.seed).embeddings.float()
        sink_ids = base.identity.sink_ids
        self.lesson = work.lesson(engine.prompter)
        self.student: Student
        if arm == "links":
            loader = Loader(runner=runner, store=store, identity=base.identity, sink=base.sink)
            self.student = RequestSide(runner, loader.load, links=links)
            self.rows = self.lesson.prompt.layout(num_links=work.links).num_link_tokens + len(self.lesson.rows().ids)
        else:
            self.student = WholePrompt(runner, links=links, sink_ids=sink_ids)
            self.rows = len(WholeRows.of(self.lesson, num_links=work.links, sink_ids=sink_ids))
        self._runner = runner
        self._teacher = Teacher(runner, model=base.identity.model, folder=folder)
        recipe = Recipe()
        self._clip = recipe.clip
        self._optimiser = torch.optim.AdamW(self.student.trained.values(), lr=recipe.lr, weight_decay=0.0)

    def __call__(self) -> None:
        """Forward, backward, and a change of the links."""
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.student.trained.values(), self._clip)
        self._optimiser.step()
        self._runner.synchronize()

    def backward(self) -> Tensor:
        """Compute the mean divergence from the teacher over the answer's tokens, and its gradients."""
        self._optimiser.zero_grad()
        scored = self.lesson.rows().scored.to(self._runner.device)
        loss = distill(self.student.logits(self.lesson), self._teacher(self.lesson))[scored].mean()
        loss.backward()
        return loss.detach()


def bench_train_step(
    engine: Engine,
    *,
    model: str,
    work: Work = Work(),
    repeats: int = 7,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one row per arm.

    Args:
        engine: Gives the model; its store is not used.
        model: What it was loaded from: the processes that measure memory load it again.
        repeats: Counted rounds.
        progress: Called after each run, `runs_of` times in all.
    """
    with TemporaryDirectory(prefix="kvlink-bench-") as temporary:
        folder = Path(temporary)
        with DiskStore(folder / "entries") as store:
            steps = {arm: Step(engine, arm, work, store=store, folder=folder / "teacher") for arm in ARMS}
            steps["links"].backward()  # fills both folders
            memory: dict[Arm, Memory | None] = {}
            for arm in ARMS:  # before this process has grown by steps of its own
                memory[arm] = memory_of(engine, arm, work, model=model, folder=folder)
                progress()
            samples = alternate(steps, repeats=repeats, progress=progress)
    packed, packed_memory = samples["packed"].median, memory["packed"]
    rows: list[dict[str, Any]] = []
    for arm in ARMS:
        row = {**asdict(work), "arm": arm, "rows": steps[arm].rows, **samples[arm].to_json()}
        row["times_faster"] = packed / samples[arm].median
        found = memory[arm]
        row |= asdict(found) if found else {"loaded_bytes": None, "step_bytes": None}
        row["memory_share"] = found.step_bytes / packed_memory.step_bytes if found and packed_memory else None
        rows.append(row)
    return rows


def runs_of(repeats: int) -> int:
    """Return how often `progress` is called."""
    return len(ARMS) * (1 + repeats) + len(ARMS)


def memory_of(engine: Engine, arm: Arm, work: Work, *, model: str, folder: Path) -> Memory | None:
    """Measure one arm in a process of its own, on what a folder has; None where the system does not tell its memory."""
    runner = engine.runner
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        threads, device = torch.get_num_threads(), str(runner.device)
        return pool.submit(_measure, model, runner.dtype, device, arm, work, folder, threads).result()


def _measure(
    model: str, dtype: torch.dtype, device: str, arm: Arm, work: Work, folder: Path, threads: int
) -> Memory | None:
    torch.set_num_threads(threads)
    with DiskStore(folder / "entries") as store:
        engine = Engine.from_pretrained(model, dtype=dtype, device=device, links=None)
        step = Step(engine, arm, work, store=store, folder=folder / "teacher")
        if engine.runner.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            loaded = torch.cuda.memory_allocated()
        elif not _forget_peak():
            return None
        else:
            loaded = _peak_bytes()
        for _ in range(MEMORY_STEPS):
            step()
        peak = torch.cuda.max_memory_allocated() if engine.runner.device.type == "cuda" else _peak_bytes()
        return Memory(loaded, peak - loaded)


def _forget_peak() -> bool:
    """Give free memory back to the system and begin to watch the peak anew; False where the system cannot do that.

    Without both, memory that loading has left behind would be used by steps without being seen.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # of glibc alone
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_bytes() -> int:
    """Return the most memory that this process has had resident since its peak was forgotten."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
