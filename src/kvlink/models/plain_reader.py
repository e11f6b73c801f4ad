"""A tokenizer's vocabulary without its control strings: how every text that a user can write becomes ids."""

import json
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, models


def plain_reader(backend: Tokenizer, spaces: dict[int, AddedToken]) -> tuple[Tokenizer, dict[int, int]]:
    """Return a reader over the backend's own vocabulary that knows no control string and puts no space before a text.

    Args:
        backend: Shares its model; not changed.
        spaces: Added tokens that are nothing but white space: ordinary text to the model, so they are kept.

    Returns:
        The reader, and the ids that it gives other numbers than the backend: `{its id: the backend's id}`.
    """
    shell = Tokenizer(models.BPE())
    shell.normalizer, shell.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    shell = Tokenizer.from_str(json.dumps(_without_prefix(json.loads(shell.to_str()))))
    reader = Tokenizer(backend.model)
    reader.normalizer, reader.pre_tokenizer = shell.normalizer, shell.pre_tokenizer
    reader.add_tokens(list(spaces.values()))
    ids = {i: reader.token_to_id(token.content) for i, token in spaces.items()}
    return reader, {own: i for i, own in ids.items() if own is not None and own != i}


def _without_prefix(node: Any) -> Any:
    """Return a tokenizer's JSON with every step that puts a space before a text switched off."""
    if isinstance(node, list):
        steps = [_without_prefix(step) for step in cast("list[Any]", node)]
        return [step for step in steps if step is not None]
    if not isinstance(node, dict):
        return node
    fields = cast("dict[str, Any]", node)
    if fields.get("type") == "Prepend":
        return None
    off = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: off[name] if name in off else _without_prefix(value) for name, value in fields.items()}
