"""Where link tokens begin: four ways, each with 5 % of noise, drawn once per slot."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from kvlink.core.errors import InputError
from kvlink.models.prompt import Prompter
from kvlink.models.runner import Runner

Initialisation = Literal["mean", "state", "separator", "random"]
NOISE = 0.05
SAMPLE = 32
"""Documents from which the first two ways are computed."""


def require_initialisation(how: str) -> str:
    """Return the name of an initialisation.

    Raises:
        InputError: There is none of this name.
    """
    if how not in get_args(Initialisation):
        raise InputError(f"there is no initialisation {how!r}; there are {', '.join(get_args(Initialisation))}")
    return how


def initial_links(
    how: str,
    *,
    runner: Runner,
    prompter: Prompter,
    documents: Sequence[tuple[int, ...]],
    num_links: int,
    levels: int,
    seed: int = 0,
) -> Float[Tensor, "levels num_links hidden"]:
    """Return untrained embeddings in float32.

    Args:
        how: `mean`: the mean over documents of their mean input embedding; `state`: the mean of the last layer's
            state of their last token, at the RMS of the embedding table; `separator`: the embedding of an empty line;
            `random`: normal at that RMS.
        documents: Ids of some training documents.

    Raises:
        InputError: There is no such initialisation, or this tokenizer has no separator.
    """
    table = runner.embed(range(min(4096, runner.embedding.num_embeddings))).detach()  # some families scale it here
    rms = table.float().square().mean().sqrt()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(levels, num_links, table.shape[1], generator=generator).to(table.device)
    sample = documents[:SAMPLE]
    match require_initialisation(how):
        case "mean":
            centre = torch.stack([runner.embed(ids).float().mean(0) for ids in sample]).mean(0)
        case "state":
            centre = torch.stack([_last_state(runner, ids) for ids in sample]).mean(0)
            centre = centre * (rms / centre.square().mean().sqrt())
        case "separator":
            line = prompter.plain_ids("\n\n")
            if not line:
                raise InputError("this tokenizer makes nothing of an empty line: begin with mean, state or random")
            centre = runner.embed(line).float().mean(0)
        case _:  # random
            return (rms * noise).detach()
    return (centre + NOISE * rms * noise).detach().clone()


def _last_state(runner: Runner, ids: tuple[int, ...]) -> Float[Tensor, " hidden"]:
    with torch.inference_mode():
        inputs = torch.tensor([ids], device=runner.device)
        return (
            runner.model(input_ids=inputs, output_hidden_states=True, use_cache=False).hidden_states[-1][0, -1].float()
        )
