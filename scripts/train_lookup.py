"""Train the tiny model that tests/lookup.py describes, into tests/fixtures/lookup: one CPU thread, one to two minutes.

    python scripts/train_lookup.py [--out FOLDER] [--seed 0]

It learns from plain text by full causal attention; it never sees a document that is encoded alone, nor a link token.
First it learns to look up: names, some filler, values, and all of that again in another order, the filler growing
whenever nine in ten are right. Then prompts, with the ids that serving uses. The same seed gives the same weights on
the same machine; another machine may round differently. Needs torch 2.9 or newer (Muon).
"""

import argparse
import math
import os
import random
import sys
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvlink.core.document import Document
from kvlink.models.prompt import Prompter
from kvlink.training.data import QUESTION, SYSTEM
from lookup import COLOURS, FOLDER, NAMES, THINGS, owners

CONTROL = ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
WORDS = (
    *("Question", ":", "Answer", "the", "question", "using", "documents", "in", "a", "few", "words", ".", "-"),
    *("\n", "\n\n", "has", "It", "is", "thing", "colour", "of"),
)
FILLER = ("has", "a", "It", "is", ".", "\n", "\n\n", "-", "thing", "colour", "of", "Answer", *CONTROL[3:])
TEMPLATE = (
    "{{ '<|endoftext|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BATCH, PAIRS, REPEATS, LONGEST_GAP = 32, 6, 3, 10

Batch = tuple[Tensor, list[int]]
"""Ids `[batch, tokens]`, and the places whose next token is to be told."""


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary is the task's: words, signs and line breaks; spaces are dropped."""
    vocab = {word: i for i, word in enumerate((*CONTROL, "<unk>", *WORDS, *NAMES, *THINGS, *COLOURS))}
    special = dict(zip(("bos_token", "eos_token", "pad_token"), (*CONTROL[:2], CONTROL[0]), strict=True))
    unknown = {"unk_token": "<unk>"}
    backend = Tokenizer(models.WordLevel(vocab, **unknown))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]|\n+"), "removed", invert=True)
    backend.add_special_tokens([*CONTROL, "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **special, **unknown)


def new_model(tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """Return a model whose first layer looks at what is near: equal biases of queries and keys, turned apart by RoPE.

    Without that it stays at guessing for thousands of steps.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=True,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.125,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    near: Any = model.model.layers[0]
    with torch.no_grad():
        near.self_attn.q_proj.bias.normal_(std=2.0)
        near.self_attn.k_proj.bias.copy_(near.self_attn.q_proj.bias)
    return model


def pairs(tokenizer: PreTrainedTokenizerFast, draw: random.Random, gap: int) -> Batch:
    """Return names and values, at most `gap` fillers between, in several orders; to be told from the second on."""
    names, values, filler = (
        torch.tensor(tokenizer.convert_tokens_to_ids(list(some))) for some in (NAMES, (*THINGS, *COLOURS), FILLER)
    )
    name = names[torch.rand(BATCH, len(names)).argsort(1)[:, :PAIRS]]
    value = values[torch.rand(BATCH, len(values)).argsort(1)[:, :PAIRS]]
    columns: list[Tensor] = []
    told: list[int] = []
    width = 0
    for turn in range(1 + REPEATS):
        for i in draw.sample(range(PAIRS), PAIRS):
            between = filler[torch.randint(len(filler), (BATCH, draw.randint(0, gap)))]
            columns += [name[:, i : i + 1], between, value[:, i : i + 1]]
            width += 2 + between.shape[1]
            if turn:
                told.append(width - 2)
    return torch.cat(columns, 1), told


def prompts(prompter: Prompter, draw: random.Random) -> Batch:
    """Return prompts of one shape, with a run of dashes behind each document or none.

    Half of them end with a question and its answer, half with all that can be asked, line by line.
    """
    count, worded, ask = draw.randint(2, 4), draw.random() < 0.5, draw.random() < 0.5
    dashes = prompter.answer_ids("- " * draw.choice((0, 0, 2, 3, 4, 5, 6)))[:-1]
    system = prompter.system_ids(SYSTEM if draw.random() < 0.75 else None)
    rows: list[list[int]] = []
    told: list[int] = []
    for _ in range(BATCH):
        some = owners(draw, count)
        texts = chain.from_iterable(owner.texts for owner in some)
        row = [*system, *(i for text in texts for i in (*prompter.document_ids(Document(text)), *dashes))]
        asked = draw.sample([question for owner in some for question in owner.questions], 1 if ask else 2 * count)
        told = []
        for question in asked:
            text = QUESTION.format(question=question.text) if worded else question.text
            answer = prompter.answer_ids(question.answer if ask else f"{question.text} {question.answer}\n")
            row += [*prompter.tail_ids(text), *answer] if ask else answer[:-1]
            told += [len(row) - 3, len(row) - 2] if ask else [len(row) - 3]
        rows.append(row)
    return torch.tensor(rows), told


def step(model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], batch: Batch) -> float:
    """Learn from one batch and return the share of tokens that were told right."""
    ids, places = batch
    wanted = ids[:, [place + 1 for place in places]]
    logits = model(input_ids=ids, use_cache=False).logits[:, places]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return (logits.argmax(-1) == wanted).float().mean().item()


def optimizers_of(model: LlamaForCausalLM, scale: float = 1.0) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the rest."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    return [
        torch.optim.Muon(inner, lr=0.02 * scale, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=3e-3 * scale, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> None:
    """Learn to look up, then to answer prompts."""
    draw = random.Random(seed)  # noqa: S311 (nothing secret)
    start, prompter = perf_counter(), Prompter(tokenizer=tokenizer)

    def report(number: int, what: str, right: float) -> None:
        if number % 50 == 0:
            print(f"{number:5} {what:8} right {right:.2f}  {perf_counter() - start:4.0f} s", flush=True)

    gap, right, optimizers = 0, 0.0, optimizers_of(model)
    for number in range(1, 2001):
        right += 0.1 * (step(model, optimizers, pairs(tokenizer, draw, gap)) - right)
        report(number, f"gap {gap}", right)
        if right > 0.9:
            if gap == LONGEST_GAP:
                break
            gap, right = gap + 1, 0.5
    else:
        sys.exit(f"after 2000 steps it looks up over {gap} fillers at most: try another seed")
    optimizers, right = optimizers_of(model, 0.5), 0.0
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda at: min(1, at / 50, 1.02 - math.sin(math.pi / 2 * at / steps)))
        for one in optimizers
    ]
    for number in range(1, steps + 1):
        right += 0.05 * (step(model, optimizers, prompts(prompter, draw)) - right)
        report(number, "prompts", right)
        for schedule in schedules:
            schedule.step()


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900, help="steps on prompts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = word_tokenizer()
    model = new_model(tokenizer, options.seed)
    train(model, tokenizer, options.seed, options.steps)
    model.half().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"saved to {options.out}; tests/models/test_lookup.py says whether it serves")


if __name__ == "__main__":
    main()
