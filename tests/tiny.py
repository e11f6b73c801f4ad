"""Tiny tokenizers of every kind that matters, built offline; the ids 0, 1, 2 are pad or unknown, BOS, EOS."""

from collections.abc import Sequence
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's: BOS is `<|im_start|>`, and there is a system prompt by default."""

DATED = (
    "{{ '<|endoftext|>' }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']|trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% else %}{% set today = 'never' %}"
    "{% endif %}{{ '<|im_start|>system\n\nToday Date: ' + today + '\n\n' + system + '<|im_end|>' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n\n' + message['content']|trim + '<|im_end|>'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
"""Llama 3's: today's date in the header, contents trimmed."""

NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else 'user' %}"
    "{{ '<|im_start|>' + role + '\n' + message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>model\n'}}{% endif %}"
)
"""Gemma's (1 and 2): a system turn is an error."""

INST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '')"
    " + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""Llama 2's: plain text for turns, the system prompt folded into the user's."""

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(
    template: str | None = CHATML,
    *,
    bos: str | None = "<|im_start|>",
    merges: Sequence[tuple[str, str]] = (),
    more: Sequence[AddedToken] = (),
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: three control tokens, 256 bytes, then merges, then `more` added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*CONTROL, *alphabet, *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(CONTROL))
    backend.add_tokens(list(more))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=template,
    )


def metaspace_tokenizer(
    kind: Literal["bpe", "unigram"] = "bpe",
    template: str | None = INST,
    *,
    prefix: Literal["metaspace", "normalizer", "none"] = "metaspace",
    byte_fallback: bool = True,
) -> PreTrainedTokenizerFast:
    """Return a SentencePiece-like tokenizer whose vocabulary lets plain text reach `</s>` and `<unk>`."""
    letters = [chr(i) for i in range(33, 127)]
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    words = [left + right for left, right in merges]
    fallback = [f"<0x{i:02X}>" for i in range(256)] if byte_fallback else ["\n"]
    entries = list(dict.fromkeys(["<unk>", "<s>", "</s>", *fallback, "▁", *letters, *words]))
    if kind == "bpe":
        vocab = {entry: i for i, entry in enumerate(entries)}
        model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True)
    else:
        model = models.Unigram([(e, 0.0 if i < 3 else -2.0) for i, e in enumerate(entries)], 0, byte_fallback)
    backend = Tokenizer(model)
    if prefix == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if prefix == "metaspace" else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps if prefix == "none" else [*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
