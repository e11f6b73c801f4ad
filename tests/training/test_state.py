"""The state of a run comes back bit for bit, is written whole or not at all, and is not taken for another run's."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvlink.core.errors import InputError
from kvlink.training import state as module
from kvlink.training.state import NAME, State, forget_state, read_state, write_state

SETTINGS = {"recipe": {"lr": 0.1, "patience": None}, "lessons": ["a", "b"], "shapes": {"links": [2, 3]}}


def state_of(seed: int = 0, *, steps: int = 2) -> State:
    """Return a state with an optimiser that has taken some steps on two groups."""
    generator = torch.Generator().manual_seed(seed)
    links, up = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((2, 3), (4,)))
    groups = [{"params": [links], "lr": 0.1}, {"params": [up], "lr": 1 / 3, "weight_decay": 0.01}]
    optimiser = torch.optim.AdamW(groups)
    for _ in range(steps):
        optimiser.zero_grad()
        ((links**2).sum() + (up**3).sum()).backward()
        optimiser.step()
    now = {"links": links.detach().clone(), "up.model.layers.0.q": up.detach().clone()}
    best = {name: tensor + 1 for name, tensor in now.items()}
    outcome = {"steps": steps, "loss": 1 / 3, "curve": [[0, {"kl": 0.1}]], "bad": float("nan")}
    return State(now, best, optimiser.state_dict(), outcome, SETTINGS)


def flat(state: State) -> dict[str, Any]:
    found: dict[str, Any] = {f"now.{name}": tensor for name, tensor in state.now.items()}
    found |= {f"best.{name}": tensor for name, tensor in state.best.items()}
    for index, kept in state.optimiser["state"].items():
        found |= {f"{index}.{name}": tensor for name, tensor in kept.items()}
    return found


@pytest.mark.parametrize("steps", [0, 2])
def test_what_is_read_is_what_was_written(tmp_path: Path, steps: int) -> None:
    written = state_of(steps=steps)
    write_state(tmp_path, written)
    found = read_state(tmp_path, SETTINGS)
    assert found is not None
    assert flat(found).keys() == flat(written).keys()
    assert all(torch.equal(tensor, flat(found)[name]) for name, tensor in flat(written).items())
    assert found.settings == SETTINGS
    assert str(found.outcome) == str(written.outcome)


def test_an_optimiser_goes_on_from_it_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    write_state(tmp_path, state_of(steps=2))
    found, wanted = read_state(tmp_path, SETTINGS), state_of(steps=3)
    assert found is not None
    links, up = (found.now[name].requires_grad_() for name in ("links", "up.model.layers.0.q"))
    optimiser = torch.optim.AdamW([{"params": [links]}, {"params": [up]}])
    optimiser.load_state_dict(found.optimiser)
    ((links**2).sum() + (up**3).sum()).backward()
    optimiser.step()
    assert torch.equal(links, wanted.now["links"])
    assert torch.equal(up, wanted.now["up.model.layers.0.q"])


def test_where_there_is_none_there_is_none(tmp_path: Path) -> None:
    assert read_state(tmp_path, SETTINGS) is None
    assert read_state(tmp_path / "nowhere", SETTINGS) is None


def test_a_forgotten_state_is_gone(tmp_path: Path) -> None:
    write_state(tmp_path, state_of())
    forget_state(tmp_path)
    forget_state(tmp_path)
    assert read_state(tmp_path, SETTINGS) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", ["writing", "renaming"])
def test_a_write_that_fails_leaves_the_last_state_whole(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path, state_of(1))
    before = (tmp_path / NAME).read_bytes()

    def half(tensors: Any, file: Path, **_: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("no space left on device")

    def never(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(*((module, "save_file", half) if fails == "writing" else (module.os, "replace", never)))
    with pytest.raises(InputError, match=r"the state of the run cannot be written to .*no space left"):
        write_state(tmp_path, state_of(2))
    assert [file.name for file in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"recipe": {"lr": 0.2, "patience": None}}, "recipe"),
        ({"recipe": {"lr": 0.1, "patience": 3}, "lessons": []}, "lessons, recipe"),
        ({"plan": {"mode": "lora"}}, "plan"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, other: dict[str, Any], told: str) -> None:
    write_state(tmp_path, state_of())
    with pytest.raises(InputError, match=rf"holds a run with other settings \({told}\)"):
        read_state(tmp_path, SETTINGS | other)
    with pytest.raises(InputError, match=r"other settings \(shapes\)"):
        read_state(tmp_path, {key: value for key, value in SETTINGS.items() if key != "shapes"})


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "header", "foreign"])
def test_a_file_that_cannot_be_read_is_an_error_that_says_what_to_do(tmp_path: Path, damage: str) -> None:
    write_state(tmp_path, state_of())
    file = tmp_path / NAME
    whole = file.read_bytes()
    if damage == "foreign":
        save_file({"a": torch.zeros(2)}, file)
    else:
        header = whole.replace(b'"groups":"[', b'"groups":"{')
        assert header != whole
        content = {"empty": b"", "cut": whole[:-9], "garbage": struct.pack("<Q", 2**40) + whole, "header": header}
        file.write_bytes(content[damage])
    with pytest.raises(InputError, match=r"state\.safetensors cannot be read .*delete it, or train without --resume"):
        read_state(tmp_path, SETTINGS)
