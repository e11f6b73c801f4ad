"""Tiny random models of many families, built offline from a configuration and a seed; prompts to try them on."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from kvlink.core.entry import CacheEntry
from kvlink.core.layout import Layout, Lengths, Prompt, Turn
from kvlink.models.assembler import Assembler
from kvlink.models.cache import SlotCache
from kvlink.models.links import LinkTokens
from kvlink.models.runner import Runner

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,  # peaked attention: faults show
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}
SLIDING = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 16, "layer_types": SLIDING, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 16, "layer_types": SLIDING, "query_pre_attn_scalar": 16},
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None, "rotary_pct": 0.5}),
    "glm": ("glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "cohere": ("cohere", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "starcoder2": ("starcoder2", {"sliding_window": 16}),
}
UNEXAMINED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
        },
    ),
}
"""Families of which one trait alone is tried, not all that is tried on `FAMILIES`."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 512, "init_std": 0.3}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16}),
}


Spoil = Callable[[SlotCache, Layout, list[CacheEntry]], None]
"""What a negative control does to an assembled buffer."""


@functools.cache
def _config(name: str) -> Any:
    kind, options = {**FAMILIES, **UNEXAMINED, **REFUSED}[name]
    merged = {key: value for key, value in {**BASE, **options}.items() if value is not None or key == "sliding_window"}
    return AutoConfig.for_model(kind, **merged)


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """Build a model; the same weights for the same seed.

    Args:
        options: Set on its configuration. There are 2 layers; kinds of further ones repeat those of the first.
    """
    torch.manual_seed(seed)
    config = copy.deepcopy(_config(name))
    for key, value in options.items():
        setattr(config, key, value)
    kinds = getattr(config, "layer_types", None)
    if kinds and len(kinds) != config.num_hidden_layers:  # some families have no setter
        config.layer_types = [kinds[at % len(kinds)] for at in range(config.num_hidden_layers)]
    softcap = getattr(config, "attn_logit_softcapping", None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if softcap else None)
    for module in model.modules():  # norms start at one or zero; give them something to be wrong about
        if "Norm" in type(module).__name__:
            for parameter in module.parameters():
                nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    for parameter in model.parameters():  # not `model.to(dtype)`, which would round the rotary frequencies, too
        parameter.data = parameter.data.to(dtype)
    return model.eval()


@functools.cache
def tiny_runner(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Runner:
    """Return a runner that all tests share: they may read it, and must not change it or its model."""
    return Runner(tiny_model(name, dtype=dtype, **options))


def tiny_assembler(runner: Runner, *, num_links: int = 6) -> Assembler:
    """Return an assembler with random link tokens of two levels, or without."""
    return Assembler(runner, links=LinkTokens.random(runner.embedding, num_links=num_links) if num_links else None)


class DoublePrecision(TorchFunctionMode):
    """Float64 all through, a double of the model's own arithmetic, in whatever family.

    Models ask for float32 by name, whatever their dtype: for rotary tables, norms and softmax, Cohere for its keys.
    Inside this block they get float64 instead. What is left is the method's own error, if it had one.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def double(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(double, args), **{key: double(value) for key, value in (kwargs or {}).items()})


def random_ids(count: int, *, seed: int) -> tuple[int, ...]:
    """Draw ids; none is a control id."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 300, (count,), generator=generator).tolist())


def tiny_prompt(
    *,
    system: int = 6,
    documents: Sequence[Sequence[int]] = ((20, 7), (11,), (1,), (17,)),
    labels: Sequence[int] = (2, 0, 1, 2),
    tail: int = 8,
    history: Sequence[Lengths] = (),
) -> Prompt:
    """Return a prompt of random ids: by default segments beyond and below a window of 16, labels, one lone token."""
    seeds = iter(range(1000))

    def runs(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(random_ids(length, seed=next(seeds)) for length in lengths)

    (ids,) = runs([system])
    last, *earlier = (
        Turn(tuple(map(runs, turn.documents)), *runs([turn.tail]), runs(turn.labels))
        for turn in (Lengths(documents, tail, labels), *history)
    )
    return Prompt(ids, last.documents, last.tail, last.labels, tuple(earlier))


def reuse_logits(
    assembler: Assembler,
    prompt: Prompt,
    *,
    sink_ids: tuple[int, ...] = (),
    entries: list[CacheEntry] | None = None,
    spoil: Spoil | None = None,
) -> Tensor:
    """Return the logits of all request-side rows behind S by the path that reuses entries (encoded here if None)."""
    runner = assembler.runner
    layout = prompt.layout(num_links=assembler.num_links)
    if entries is None:
        entries = runner.encode(prompt.segments, prefix=runner.prefix(sink_ids)) if prompt.segments else []
    prefix = runner.prefix(prompt.system)
    assert prefix is not None
    cache = assembler.assemble(layout, prefix=prefix, entries=entries)
    if spoil:
        spoil(cache, layout, entries)
    return assembler.prefill(cache, prompt, layout, logits_to_keep=0)


def largest(difference: Tensor) -> float:
    """Return the largest magnitude; infinite for anything not a number, which no comparison would catch."""
    return difference.abs().nan_to_num(nan=float("inf")).max().item()
