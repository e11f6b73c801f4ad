"""A tiny random model for benches of traffic: a forward of milliseconds, entries of a real model's size per token.

Built from a configuration and a seed, with a tokenizer that reads a byte as a token. Needs no download.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 2,
}
"""16 KiB of keys and values per token in float32: a third of SmolLM2-135M, at a thousandth of its weights."""

NAME = "tiny Llama, made from a seed"
"""How results call it: its folder is gone when they are written."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, *, seed: int) -> Path:
    """Write weights, configuration and tokenizer into a folder, and return it. The same bytes for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    entries = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={entry: at for at, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": CONTROL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    heads = CONFIG["num_attention_heads"] * CONFIG["head_dim"]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    found = {"model.embed_tokens.weight": drawn(CONFIG["vocab_size"], hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        found |= {f"{name}.{norm}_layernorm.weight": torch.ones(hidden) for norm in ("input", "post_attention")}
        found |= {f"{name}.self_attn.{which}_proj.weight": drawn(heads, hidden) for which in "qkv"}
        found |= {f"{name}.mlp.{which}_proj.weight": drawn(inner, hidden) for which in ("gate", "up")}
        found[f"{name}.self_attn.o_proj.weight"] = drawn(hidden, heads)
        found[f"{name}.mlp.down_proj.weight"] = drawn(hidden, inner)
    return found
