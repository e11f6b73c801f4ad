"""The trial: one trace against real servers under each policy, then on simulated nodes with the costs measured there.

Arms take turns on the same servers, each with texts of its own, so that none finds what another has left. The first
requests of each run ask about each document once, and are not counted: what is missed then was evicted or is elsewhere.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from kvlink.cluster.baselines import policy_named
from kvlink.cluster.costs import Costs
from kvlink.cluster.simulate import PIECES, WARM, Cluster, percentiles, simulate
from kvlink.cluster.traffic import Drawn, Traffic, draw
from kvlink.cluster.trial.costs import measured
from kvlink.cluster.trial.processes import Program, gateway, servers
from kvlink.cluster.trial.requests import Seen, body_of, play
from kvlink.core.errors import InputError

LOST_AT = 0.5
"""When a server is killed, as a share of the run's time."""

RECOVERED = 0.9
"""Share of the hit ratio before a loss at which it counts as made up for."""

NAME = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is tried.

    Attributes:
        model: Folder of the model, or what else `kvlink serve --model` takes.
        options: Further options of `kvlink serve`.
        text, question: A document, a question, by its number and its tokens.
        token_bytes: Keys and values of one token.
        traffic: Its rate is that of one server.
        memory: All servers' device memory, in times the size of all documents.
        load: Share of the time of servers, or of cores where they are fewer, if all documents were there.
    """

    model: str
    options: Sequence[str]
    text: Callable[[int, int], str]
    question: Callable[[int, int], str]
    token_bytes: int
    traffic: Traffic
    memory: float
    load: float

    def room(self, count: int) -> int:
        """Tokens of documents that each of so many servers holds."""
        return int(self.memory * self.traffic.documents * self.traffic.tokens / count)


Progress = Callable[[], None]


def try_out(
    trial: Trial,
    folder: Path,
    *,
    counts: Sequence[int],
    policies: Sequence[str],
    lose: bool,
    progress: Progress = lambda: None,
) -> tuple[Costs, list[dict[str, Any]]]:
    """Return the costs that were measured, and a row for each number of servers and policy.

    Args:
        folder: For logs and stores.
        lose: Whether to kill a server in the middle of one more run, with the first policy and number, and start it
            again.
        progress: Is told of each request.

    Raises:
        InputError: There are too few requests, or a server does not start.
    """
    swept(draw(trial.traffic), trial.traffic)  # refuses before anything is started
    costs: Costs | None = None
    rows: list[dict[str, Any]] = []
    for count in counts:
        place = folder / str(count)
        place.mkdir()
        with servers(count, _words(trial, count), place) as started:
            if costs is None:
                costs = _costs(trial, started, place)
            arms = [(policy, False) for policy in policies]
            if lose and count == counts[0]:
                arms.append((policies[0], True))
            for number, (policy, is_lost) in enumerate(arms):
                one = _Arm(trial, costs, started, policy, first=number * trial.traffic.documents, folder=place)
                rows.append(one.lose(progress) if is_lost else one.run(progress))
    assert costs is not None, "there is a number of servers"
    return costs, rows


def num_requests(trial: Trial, *, counts: Sequence[int], policies: Sequence[str], lose: bool) -> int:
    """Return how many requests `try_out` sends, but for those that measure costs."""
    return (len(counts) * len(policies) + lose) * trial.traffic.requests


def swept(drawn: Drawn, traffic: Traffic) -> Drawn:
    """Let the first requests ask about every document once, topic by topic, in an order of their own.

    Raises:
        InputError: They are more than those that are not counted.
    """
    order = np.random.default_rng(traffic.seed + 1).permutation(traffic.documents // traffic.topic)
    starts = [min(start, traffic.topic - traffic.each) for start in range(0, traffic.topic, traffic.each)]
    rows = [topic * traffic.topic + start + np.arange(traffic.each) for topic in order.tolist() for start in starts]
    if len(rows) > int(WARM * traffic.requests):
        raise InputError(
            f"{traffic.requests} requests are too few: a first part of them asks about all {traffic.documents} "
            f"documents, so ask for {math.ceil(len(rows) / WARM)} or more"
        )
    asked = drawn.asked.copy()
    asked[: len(rows)] = rows
    return replace(drawn, asked=asked)


class _Arm:
    """One policy on some servers."""

    def __init__(
        self, trial: Trial, costs: Costs, started: Sequence[Program], policy: str, *, first: int, folder: Path
    ) -> None:
        self._trial, self._costs, self._started, self._policy = trial, costs, started, policy
        self._first, self._folder = first, folder
        hit_s = costs.hit_s(trial.traffic.question, trial.traffic.answer)
        at_once = min(len(started), len(os.sched_getaffinity(0)))
        self._traffic = replace(trial.traffic, rate=trial.load * at_once / hit_s)
        self._drawn = swept(draw(self._traffic), self._traffic)
        self._counted = int(self._traffic.requests * WARM)

    def run(self, progress: Progress) -> dict[str, Any]:
        """Return the row of a run in which nothing is lost, and of the same run on simulated nodes."""
        busy: list[list[float]] = []

        def look() -> None:
            busy.append([one.busy_s() for one in self._started])

        seen = self._play(progress, [(float(self._drawn.arrivals[self._counted]), look)])
        look()
        work = np.subtract(busy[1], busy[0])
        real = {**self._figures(seen), "imbalance": float(work.max() / work.mean())}
        simulated = self._simulated(seen, Cluster(nodes=len(self._started), room=self._room, store="none"))
        return {**self._about(), "real": real, "simulated": simulated, "off": _off(real, simulated)}

    def lose(self, progress: Progress) -> dict[str, Any]:
        """Return the row of a run in which the first server is killed, and started again at once."""
        moment = LOST_AT * float(self._drawn.arrivals[-1])
        back: list[float] = []

        def kill() -> None:
            self._started[0].kill()
            start = monotonic()
            self._started[0].start()
            self._started[0].wait()
            back.append(monotonic() - start)

        seen = self._play(progress, [(moment, kill)])
        under_way = [one for one in seen if one.asked_at < moment < one.ended_at]
        failed = [one for one in seen if one.failed]
        broken = [one for one in failed if one.ttft_s is not None and one in under_way]
        share = self._room * self._costs.encode_s
        return {
            **self._about(),
            "lost_at_s": moment,
            "back_after_s": back[0],
            "share_s": share,
            "failed": len(failed) - len(broken),
            "broken": len(broken),
            "real": self._figures(seen),
            **_recovery(seen, self._counted, moment),
        }

    @property
    def _room(self) -> int:
        return self._trial.room(len(self._started))

    def _play(self, progress: Progress, at: Sequence[tuple[float, Callable[[], None]]]) -> list[Seen]:
        bodies = [self._body(request) for request in range(self._traffic.requests)]  # none is made in time
        with gateway(self._started, self._policy, self._folder) as front:
            return play(front.url, bodies.__getitem__, self._drawn.arrivals.tolist(), at=at, progress=progress)

    def _body(self, request: int) -> dict[str, Any]:
        numbers = self._drawn.asked[request].tolist()
        texts = [self._trial.text(self._first + one, int(self._drawn.lengths[one])) for one in numbers]
        question = self._trial.question(request, self._traffic.question)
        return body_of(NAME, texts, question, int(self._drawn.answers[request]))

    def _about(self) -> dict[str, Any]:
        return {"policy": self._policy, "nodes": len(self._started), "traffic": asdict(self._traffic)}

    def _figures(self, seen: Sequence[Seen]) -> dict[str, Any]:
        counted = seen[self._counted :]
        tokens = sum(one.tokens for one in counted)
        return {
            "counted": len(counted),
            "hit_ratio": sum(one.hits for one in counted) / tokens if tokens else None,
            "ttft_s": percentiles([one.ttft_s for one in counted if one.ttft_s is not None]),
            "failed": sum(bool(one.failed) for one in counted),
            "by_backend": [sum(one.backend == at + 1 for one in counted) for at in range(len(self._started))],
            "samples_s": [one.ttft_s for one in counted],
            "over_time": _over_time(seen, self._counted),
        }

    def _simulated(self, seen: Sequence[Seen], cluster: Cluster) -> dict[str, Any]:
        """Return the figures of the same trace on simulated nodes, answers as long as they really were."""
        answers = np.array([max(1, one.answer) for one in seen], dtype=np.int64)
        drawn = Drawn(self._drawn.lengths, self._drawn.arrivals, self._drawn.asked, answers, [])
        policy = policy_named(self._policy, seed=self._traffic.seed)
        row = simulate(policy, cluster, self._traffic, self._costs, drawn=drawn)
        return {name: row[name] for name in ("hit_ratio", "ttft_s", "imbalance", "encoded_tokens")}


def _words(trial: Trial, count: int) -> list[str]:
    """Return the options of each server: device memory for its share of the documents, and no room on the disk."""
    beside = 8 / 7  # one part in eight is for known beginnings
    device = trial.room(count) * trial.token_bytes * beside / 2**30
    memory = ["--device-memory", f"{max(device, 0.001):.6f}", "--budget", "0.001"]
    return ["--model", trial.model, "--name", NAME, *memory, "--prefill-rows", "512", *trial.options]


def _costs(trial: Trial, started: Sequence[Program], folder: Path) -> Costs:
    """Measure one server, by way of a gateway, as all requests come."""
    with gateway(started[:1], "affinity", folder) as front:
        return measured(
            front.url,
            NAME,
            text=trial.text,
            question=trial.question,
            documents=trial.traffic.each,
            tokens=trial.traffic.tokens,
            question_tokens=trial.traffic.question,
            token_bytes=trial.token_bytes,
        )


def _off(real: dict[str, Any], simulated: dict[str, Any]) -> dict[str, float | None]:
    """Return how far the simulated figures are from the real ones, as shares of these."""
    pairs = {name: (real[name], simulated[name]) for name in ("hit_ratio", "imbalance")}
    pairs |= {f"ttft_{name}": (real["ttft_s"][name], simulated["ttft_s"][name]) for name in ("p50", "p99")}
    return {
        name: (there - here) / here if here and there is not None else None for name, (here, there) in pairs.items()
    }


def _over_time(seen: Sequence[Seen], first: int) -> list[dict[str, float]]:
    """Return the hit ratio in equal pieces of the counted requests."""
    parts = [part for part in np.array_split(np.arange(first, len(seen)), PIECES) if len(part)]
    found: list[dict[str, float]] = []
    for part in parts:
        chosen = [seen[at] for at in part.tolist() if seen[at].tokens]
        if chosen:
            ratio = sum(one.hits for one in chosen) / sum(one.tokens for one in chosen)
            found.append({"until_s": chosen[-1].asked_at, "hit_ratio": ratio})
    return found


def _recovery(seen: Sequence[Seen], first: int, moment: float, *, window: int = 30) -> dict[str, float | None]:
    """Return the hit ratio before a loss and in the worst window behind it, and when a later window has most of it."""
    before = [one for one in seen[first:] if one.asked_at < moment and one.tokens]
    after = [one for one in seen if one.asked_at >= moment and one.tokens]
    ratio = _ratio(before)
    wanted = RECOVERED * ratio
    ratios = [_ratio(after[at : at + window]) for at in range(len(after) - window + 1)]
    lowest = min(ratios, default=0.0)
    dip = ratios.index(lowest) if ratios else 0
    again = next((at for at in range(dip, len(ratios)) if ratios[at] >= wanted), None)
    return {
        "hit_ratio_before": ratio,
        "hit_ratio_lowest": lowest,
        "recovered_after_s": None if again is None else after[again].asked_at - moment,
    }


def _ratio(seen: Sequence[Seen]) -> float:
    return sum(one.hits for one in seen) / max(1, sum(one.tokens for one in seen))
