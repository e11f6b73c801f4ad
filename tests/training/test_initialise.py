"""Link tokens begin where they are told to, at the size of the model's own embeddings, each a little apart."""

import pytest
import torch
from lessons import PROMPTER, TOKENIZER, shared_runner
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.models.prompt import Prompter
from kvlink.models.runner import Runner
from kvlink.training.initialise import NOISE, SAMPLE, initial_links, require_initialisation
from tiny_models import random_ids

DOCUMENTS = [random_ids(5 + number, seed=number) for number in range(4)]
WAYS = ("mean", "state", "separator", "random")


def begun(how: str, *, runner: Runner | None = None, prompter: Prompter = PROMPTER, **changed: object) -> Tensor:
    given = {"documents": DOCUMENTS, "num_links": 200, "levels": 2, "seed": 0, **changed}
    return initial_links(how, runner=runner or shared_runner(), prompter=prompter, **given)  # type: ignore[arg-type]


def rms_of(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()


@pytest.mark.parametrize("how", WAYS)
def test_they_are_float32_leaves_of_the_shape_that_is_asked_for(how: str) -> None:
    links = begun(how, num_links=3, levels=2)
    assert (links.shape, links.dtype, links.requires_grad) == ((2, 3, 64), torch.float32, False)
    assert begun(how, num_links=5, levels=1).shape == (1, 5, 64)
    assert links.isfinite().all()


@pytest.mark.parametrize("how", WAYS)
def test_a_seed_decides_them(how: str) -> None:
    assert torch.equal(begun(how, seed=3), begun(how, seed=3))
    assert not torch.equal(begun(how, seed=3), begun(how, seed=4))


@pytest.mark.parametrize("how", WAYS)
def test_no_two_slots_are_alike(how: str) -> None:
    slots = begun(how).flatten(0, 1)
    distances = torch.cdist(slots, slots) + 9 * torch.eye(len(slots))
    assert distances.min() > 0.05


@pytest.mark.parametrize("how", WAYS[:3])
def test_noise_is_a_twentieth_of_the_embeddings_size(how: str) -> None:
    links, size = begun(how), rms_of(shared_runner().embedding.weight)
    assert rms_of(links - links.mean((0, 1))) == pytest.approx(NOISE * size, rel=0.05)


def test_random_ones_have_the_size_of_the_embeddings() -> None:
    links = begun("random")
    assert rms_of(links) == pytest.approx(rms_of(shared_runner().embedding.weight), rel=0.05)
    assert rms_of(links.mean((0, 1))) < 0.1 * rms_of(links)


def test_the_mean_is_that_of_documents_and_not_of_tokens() -> None:
    table = shared_runner().embedding.weight
    wanted = torch.stack([table[list(ids)].mean(0) for ids in DOCUMENTS]).mean(0)
    assert torch.allclose(begun("mean").mean((0, 1)).double(), wanted, atol=5e-3)


def test_the_state_is_that_behind_the_last_token_at_the_size_of_an_embedding() -> None:
    runner = shared_runner()
    with torch.inference_mode():
        states = [
            runner.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
            for ids in DOCUMENTS
        ]
    found, wanted = begun("state").mean((0, 1)).double(), torch.stack(states).mean(0)
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.999
    assert rms_of(found) == pytest.approx(rms_of(runner.embedding.weight), rel=0.02)


def test_the_separator_is_an_empty_line() -> None:
    ids = list(PROMPTER.plain_ids("\n\n"))
    wanted = shared_runner().embedding.weight[ids].mean(0)
    assert torch.allclose(begun("separator").mean((0, 1)).double(), wanted, atol=5e-3)


def test_a_tokenizer_without_an_empty_line_is_an_error_and_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    prompter = Prompter(tokenizer=TOKENIZER)
    monkeypatch.setattr(prompter, "plain_ids", lambda text: ())
    with pytest.raises(InputError, match="makes nothing of an empty line: begin with mean, state or random"):
        begun("separator", prompter=prompter)


@pytest.mark.parametrize("how", WAYS)
def test_where_the_model_scales_embeddings_itself_links_have_the_scaled_size(how: str) -> None:
    runner = shared_runner("gemma3")
    ids = range(320)
    assert rms_of(runner.embed(ids)) == pytest.approx(8 * rms_of(runner.embedding.weight), rel=1e-3)
    links = begun(how, runner=runner)
    spread = rms_of(links - links.mean((0, 1)))
    assert spread == pytest.approx((1 if how == "random" else NOISE) * rms_of(runner.embed(ids)), rel=0.05)


@pytest.mark.parametrize("how", ["mean", "state"])
def test_only_the_first_documents_are_looked_at(how: str) -> None:
    many = [random_ids(3, seed=number) for number in range(SAMPLE + 1)]
    assert torch.equal(begun(how, documents=many), begun(how, documents=many[:SAMPLE]))
    assert not torch.equal(begun(how, documents=many), begun(how, documents=many[1:]))


@pytest.mark.parametrize("how", ["", "Mean", "zeros"])
def test_another_way_is_an_error_that_lists_them(how: str) -> None:
    told = f"there is no initialisation '{how}'; there are mean, state, separator, random"
    with pytest.raises(InputError, match=told):
        begun(how)
    with pytest.raises(InputError, match=told):
        require_initialisation(how)
