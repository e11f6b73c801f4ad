"""Hold every device path to the reference on a GPU, and time TTFT in bf16 there. `make gpu-check` runs it.

Writes one JSON (default `benchmarks/gpu.json`); skips with the reason where there is no device. At most five
minutes on one GPU. No weights are downloaded: models are random, of real shapes.
"""

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from kvlink.core.layout import Prompt
from kvlink.evaluation.results import write_results
from kvlink.models.assembler import Assembler
from kvlink.models.links import LinkTokens
from kvlink.models.probe import examine
from kvlink.models.reference import reference_logits
from kvlink.models.runner import Runner

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
}
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def ids(count: int, vocab: int, generator: torch.Generator) -> tuple[int, ...]:
    """Return random ids."""
    return tuple(torch.randint(3, vocab, (count,), generator=generator).tolist())


def equality(device: torch.device) -> list[dict[str, Any]]:
    """Compare assembled prefill with the reference forward, and bits of the two ways to rotate."""
    rows: list[dict[str, Any]] = []
    for name, config in (("llama", LlamaConfig(**SMALL)), ("mistral", MistralConfig(**SMALL, sliding_window=64))):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
            runner, generator = Runner(model), torch.Generator().manual_seed(1)
            assembler = Assembler(runner, links=LinkTokens.random(runner.embedding, num_links=6))
            some = [ids(length, 512, generator) for length in (200, 90, 131)]
            prompt = Prompt(ids(12, 512, generator), tuple((d,) for d in some), ids(30, 512, generator))
            sink = ids(12, 512, generator)
            layout = prompt.layout(num_links=6)
            wanted = reference_logits(assembler, prompt, sink_ids=sink)[len(prompt.system) :]
            prefix, entries = runner.prefix(prompt.system), runner.encode(prompt.segments, prefix=runner.prefix(sink))
            assert prefix is not None
            cache = assembler.assemble(layout, prefix=prefix, entries=entries)
            found = assembler.prefill(cache, prompt, layout, logits_to_keep=0)
            span = slice(12, 212)
            rotated = runner.rotary.rotate(entries[0].keys, torch.arange(12, 212, device=device))
            error = ((found - wanted).float().norm() / wanted.float().norm()).item()
            report = examine(model)
            rows.append(
                {
                    "check": "assembled equals reference",
                    "model": name,
                    "dtype": str(dtype),
                    "logit_error": error,
                    "same_bits_rotated": torch.equal(cache.keys[:, :, span], rotated),
                    "probe": report.to_json(),
                    "passed": error <= LIMIT[dtype] and report.supported,
                }
            )
    return rows


def ttft(device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Time the first token of 10 documents by reuse (warm, K = 6) and in full, bf16, shapes of a 1B model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_1B), dtype=torch.bfloat16).to(device).eval()
    runner, generator = Runner(model), torch.Generator().manual_seed(1)
    assembler = Assembler(runner, links=LinkTokens.random(runner.embedding, num_links=6))
    rows: list[dict[str, Any]] = []
    for length in (100, 200, 500, 1000):
        some = [ids(length, 128000, generator) for _ in range(10)]
        prompt = Prompt(ids(24, 128000, generator), tuple((d,) for d in some), ids(36, 128000, generator))
        layout, prefix = prompt.layout(num_links=6), runner.prefix(prompt.system)
        entries = [entry for d in some for entry in runner.encode([d])]
        tensor = prompt.ids(prompt.layout()).to(device)[None]
        assert prefix is not None

        def reuse(placed: Any = layout, first: Any = prefix, what: Any = entries, of: Any = prompt) -> None:
            cache = assembler.assemble(placed, prefix=first, entries=what)
            int(assembler.prefill(cache, of, placed)[-1].argmax())
            assembler.release(cache)

        def full(everything: torch.Tensor = tensor) -> None:
            with torch.inference_mode():
                int(runner.forward(cache=None, input_ids=everything)[0, -1].argmax())

        samples: dict[str, list[float]] = {"full": [], "assembled": []}
        for round_ in range(repeats + 2):
            for name, arm in (("full", full), ("assembled", reuse)):
                torch.cuda.synchronize()
                start = perf_counter()
                arm()
                torch.cuda.synchronize()
                if round_ >= 2:
                    samples[name].append(perf_counter() - start)
        base = median(samples["full"])
        for name, seconds in samples.items():
            row = {"check": "ttft", "documents": 10, "tokens": length, "arm": name, "state": "warm", "links": 6}
            rows.append(
                row | {"median_s": median(seconds), "samples_s": seconds, "reduction": 1 - median(seconds) / base}
            )
    return rows


def main() -> None:
    """Run both parts, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/gpu.json"))
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} sees no CUDA device; the GPU paths stay unverified here")
        return
    device = torch.device("cuda")
    rows = equality(device) + ttft(device, options.repeats)
    write_results(options.json, "gpu-check", rows, model={"name": "random weights", "digest": None}, seed=0)
    for row in rows:
        print({key: value for key, value in row.items() if key not in ("samples_s", "probe")})
    if not all(row.get("passed", True) for row in rows):
        sys.exit("gpu-check failed: see the rows above")


if __name__ == "__main__":
    main()
