"""`bench codecs`: one line per length, codec and number of threads; every sample in the JSON."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvlink.evaluation.bench.codecs import ARMS
from kvlink.store import CODECS

Run = Callable[..., Any]
VERB = ("bench", "codecs", "--tokens", "40,33", "--repeats", 1, "--threads", "1")


def test_it_writes_its_rows_with_model_and_seed(run: Run, model: str) -> None:
    found = json.loads(run(*VERB, "-m", model, "--json", "-").stdout)
    assert (found["command"], found["model"]["name"], found["seed"]) == ("bench codecs", model, 0)
    assert len(found["results"]) == 2 * len(CODECS) * len(ARMS)


def test_it_shows_a_table_with_every_codec(run: Run, model: str) -> None:
    result = run(*VERB, "-m", model, COLUMNS="200")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if "GB/s" in line]
    assert [[codec in line for codec in CODECS] for line in lines] == 2 * [
        [codec == other for codec in CODECS] for other in CODECS
    ]


@pytest.mark.parametrize("wrong", [("--tokens", "a"), ("--threads", "0"), ("--threads", "1,,2")], ids=" ".join)
def test_a_list_of_numbers_that_is_none_is_a_usage_error(run: Run, model: str, wrong: tuple[str, str]) -> None:
    result = run("bench", "codecs", *wrong, "-m", model)
    assert result.exit_code == 2
    assert "is not a list of numbers" in result.stderr
