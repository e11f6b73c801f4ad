"""The arm llama.cpp computes what it says, and says why where it cannot."""

import sys
from pathlib import Path

import pytest

from kvlink import Engine, InputError
from kvlink.core.layout import Prompt
from kvlink.evaluation.bench.llama_cpp import LlamaCpp
from kvlink.evaluation.bench.ttft import bench_ttft, runs_of
from kvlink.models.checkpoint import gguf_of


def test_only_files_and_the_demo_are_known_to_it(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    assert gguf_of(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    assert gguf_of(str(tmp_path / "folder.gguf")) is gguf_of("org/name") is None


def test_without_the_package_it_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(InputError, match=r"kvlink\[llama\]"):
        LlamaCpp(tmp_path / "model.gguf", capacity=8)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python, which takes ten minutes to compile, is not installed")
    (tmp_path / "model.gguf").write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"model\.gguf"):
        LlamaCpp(tmp_path / "model.gguf", capacity=8)


@pytest.mark.demo
def test_its_rows_stand_beside_the_others_and_behind_a_known_prompt_little_is_computed() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python, which takes ten minutes to compile, is not installed")
    gguf = gguf_of("demo")
    assert gguf is not None
    calls: list[None] = []
    with Engine.from_pretrained("demo", links=None) as engine:
        rows = bench_ttft(
            engine, documents=2, tokens=[40], links=[0], repeats=1, gguf=gguf, progress=lambda: calls.append(None)
        )
        assert len(calls) == runs_of(engine, [40], [0], 1, scenarios=False, llama=True)
        full, cached = (row for row in rows if row["arm"].startswith("llama.cpp"))
        whole = next(row["computed_tokens"] for row in rows if row["arm"] == "full")
        prompter = engine.prompter
        ids = [*prompter.system_ids(None), *prompter.tail_ids("What is the capital of France?")]
        prompt = Prompt(prompter.system_ids(None), (), prompter.tail_ids("What is the capital of France?"))
        assert prompt.ids(prompt.layout()).tolist() == ids
        said = prompter.decode([LlamaCpp(gguf, capacity=len(ids)).first_token(ids)])
    assert full["computed_tokens"] == whole
    assert cached["computed_tokens"] < 40
    assert said.strip() == "The"
