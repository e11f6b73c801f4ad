"""The figures on the page of settings are those of the code."""

import inspect
import os
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from pages import DOCS, ROOT

import kvlink
from kvlink.cli import documents, options
from kvlink.cli.serve import serve
from kvlink.demo import corpus, questions
from kvlink.engine import batches, build, prefiller, residency, sampling
from kvlink.engine.limits import Limits
from kvlink.store import disk, recompressing, room

PAGE = DOCS / "reference" / "settings.md"
NUMBERS = {6: "six", 8: "Eight", 14: "fourteen", 20: "twenty"}


def default(function: object, name: str) -> object:
    """Return the default of an argument."""
    return inspect.signature(function).parameters[name].default


def row(name: str) -> str:
    """Return the row of a setting."""
    (found,) = (line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| `{name}` |"))
    return found


def test_defaults_of_the_engine_are_those_of_the_code() -> None:
    for name in (
        "model",
        "sink",
        "store",
        "tokenizer",
        "dtype",
        "device",
        "context",
        "secret",
        "store_key",
        "recompress",
        "device_bytes",
        "limits",
    ):
        assert f"| `{default(kvlink.Engine.from_pretrained, name)!r}` |".replace("'", '"') in row(name)


def test_defaults_of_a_request_are_those_of_the_code() -> None:
    for name in ("system", "labels", "stop", "on_overflow", "reuse", "sampling", "order", "deadline_s"):
        assert f"| `{default(kvlink.Engine.job, name)!r}` |".replace("'", '"') in row(name)
    assert default(kvlink.Engine.job, "max_new_tokens") is None
    assert default(documents.ask, "max_new_tokens") == sampling.MAX_NEW_TOKENS
    assert f"| `None`: that of `sampling`, else {sampling.MAX_NEW_TOKENS} tokens |" in row("max_new_tokens")


def test_limits_of_the_scheduler_are_those_of_the_code() -> None:
    for field in fields(Limits):
        assert f"| `{field.default}` |" in row(field.name)


def test_limits_of_the_server_are_those_of_the_code() -> None:
    limits = Limits()
    for name in ("max_running", "max_queue", "prefill_rows"):
        assert default(serve, name) == getattr(limits, name)
    assert default(serve, "request_memory") == limits.own_bytes / 2**30


def test_the_budget_of_the_device_is_that_of_the_code() -> None:
    text = " ".join(PAGE.read_text("utf-8").split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert f"on a CPU {residency.device_bytes(torch.device('cpu')) / memory:.0%} of the".replace("%", " %") in text
    assert f"One part in {build.BEGINNINGS_SHARE} of it is for known beginnings" in text


def test_the_budget_of_a_gpu_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000))
    share = residency.device_bytes(torch.device("cuda")) / 1000
    assert f"{share:.0%} of a GPU's memory".replace("%", " %") in PAGE.read_text("utf-8")


def test_budgets_and_constants_are_those_of_the_code() -> None:
    text = PAGE.read_text("utf-8")
    assert default(kvlink.DiskStore.__init__, "budget_bytes") == 20 * 2**30
    assert "20 GiB" in text
    assert f"{prefiller.KNOWN_SYSTEMS} system prompts" in text
    assert f"{batches.BATCH_TOKENS:,} tokens" in text
    assert f"begins and ends at | {recompressing.HIGH:.0%} and {recompressing.LOW:.0%}".replace("%", " %") in text
    assert f"{disk._TOUCH_S:.0f} s" in text
    assert f"{room.SCAN_S:.0f} s" in text


def test_every_environment_variable_of_the_command_line_is_on_the_page() -> None:
    assert options.Store.__metadata__[0].envvar == "KVLINK_STORE"
    for name in (
        "KVLINK_STORE",
        "KVLINK_STORE_KEY",
        "KVLINK_STORE_KEY_FILE",
        "KVLINK_RECOMPRESS",
        "XDG_CACHE_HOME",
        *(
            option.__metadata__[0].envvar
            for option in (
                options.MaxRunning,
                options.MaxQueue,
                options.PrefillRows,
                options.RequestMemory,
                options.DeviceMemory,
            )
        ),
        "HF_HUB_OFFLINE",
        "OMP_NUM_THREADS",
    ):
        assert row(name)


def test_the_demo_has_as_many_documents_and_questions_as_the_pages_say() -> None:
    asked = questions()
    assert f"{NUMBERS[len(corpus())]} documents, {NUMBERS[len(asked)]} questions" in (ROOT / "README.md").read_text(
        "utf-8"
    )
    text = (DOCS / "how-to" / "measure.md").read_text("utf-8")
    hops = [sum(question.hops == number for question in asked) for number in (1, 2)]
    assert f"{NUMBERS[hops[0]]} of the questions can be answered from one document; {NUMBERS[hops[1]]} need two" in text
