"""Answers by a JSON schema: whatever the logits say, the text follows it, and ends where it is whole."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvlink import InputError
from kvlink.core.errors import ModelError
from kvlink.engine.grammar import Grammar
from kvlink.engine.sampling import Sampled, Sampler, SamplingParams, sample
from tiny import byte_tokenizer, metaspace_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Émile", 'a"b']},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PADDED = 7
"""Logits without a token, as models have them whose vocabulary is rounded up."""

MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": lambda: byte_tokenizer(merges=[("Ġ", "t"), ('"', ":")]),
    "bpe": metaspace_tokenizer,
}
TOKENIZERS = {kind: make() for kind, make in MAKERS.items()}
KINDS = pytest.mark.parametrize("kind", MAKERS)


def grammar_of(kind: str) -> Grammar:
    tokenizer = TOKENIZERS[kind]
    return Grammar(tokenizer, vocab=len(tokenizer) + PADDED, end_ids=ends_of(kind))


def ends_of(kind: str) -> list[int]:
    return [0, TOKENIZERS[kind].eos_token_id]


GRAMMARS = {kind: grammar_of(kind) for kind in MAKERS}


def sampler_of(kind: str, schema: dict[str, Any], **asked: Any) -> Sampler:
    params = SamplingParams(json_schema=schema, **asked)
    return Sampler(params, end_ids=ends_of(kind), matcher=GRAMMARS[kind].matcher(schema))


def noise(seed: int, rows: int, kind: str) -> Tensor:
    return torch.randn(rows, GRAMMARS[kind].vocab, generator=torch.Generator().manual_seed(seed)) * 2


def answer(kind: str, one: Sampler, seed: int) -> str:
    """Generate from noise, a little in favour of an end."""
    ids: list[int] = []
    for step in range(3000):
        logits = noise(3000 * seed + step, 1, kind)
        logits[:, ends_of(kind)] += 3
        (found,) = sample(logits, [one])
        assert isinstance(found, Sampled)
        if found.id in ends_of(kind):
            return TOKENIZERS[kind].decode(ids)
        ids.append(found.id)
    raise AssertionError("no end in 3000 tokens")


@KINDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_noise_becomes_what_the_schema_says(kind: str, temperature: float) -> None:
    for seed in range(5):
        found = json.loads(answer(kind, sampler_of(kind, SCHEMA, temperature=temperature, seed=seed), seed))
        assert list(found) == ["name", "age", "tags"]
        assert found["name"] in SCHEMA["properties"]["name"]["enum"]
        assert 0 <= found["age"] <= 150
        assert len(found["tags"]) <= 3
        assert all(isinstance(tag, bool) for tag in found["tags"])


@given(value=st.recursive(st.none() | st.booleans() | st.text('a"\\é', max_size=3), st.lists, max_leaves=4))
@settings(max_examples=50)
def test_a_constant_is_written_whatever_it_is(value: Any) -> None:
    assert json.loads(answer("bytes", sampler_of("bytes", {"const": value}), 1)) == value


def test_an_answer_by_a_schema_never_ends_before_it_is_whole_nor_goes_on_behind_that() -> None:
    matcher = GRAMMARS["bytes"].matcher({"enum": [12]})
    ids = TOKENIZERS["bytes"].encode("12", add_special_tokens=False)
    for token in ids:
        assert matcher.allowed().nonzero().flatten().tolist() == [token]
        matcher.accept(token)
    assert matcher.allowed().nonzero().flatten().tolist() == ends_of("bytes")


def test_white_space_is_allowed_but_not_without_an_end() -> None:
    space = TOKENIZERS["bytes"].convert_tokens_to_ids("Ġ")
    logits = torch.zeros(1, GRAMMARS["bytes"].vocab)
    logits[0, space] = 9.0
    one = sampler_of("bytes", {"type": "array", "items": {"enum": [1]}, "minItems": 1})
    found = [token.id for _ in range(80) for token in sample(logits, [one]) if isinstance(token, Sampled)]
    assert found[:3][1:] == [space, space]
    assert set(found[2:70]) != {space}


def test_a_schema_of_one_request_binds_no_other_and_changes_with_no_batch() -> None:
    logits = [noise(step, 3, "bytes") for step in range(6)]

    def samplers() -> list[Sampler]:
        free = Sampler(SamplingParams(temperature=1.0, seed=1))
        return [sampler_of("bytes", SCHEMA, temperature=1.0, seed=2), free, sampler_of("bytes", {"type": "string"})]

    together = samplers()
    found = [sample(step, together) for step in logits]
    for row, one in enumerate(samplers()):
        assert [step[row] for step in found] == [sample(step[row : row + 1], [one])[0] for step in logits]


def test_logits_that_are_no_numbers_are_found_behind_a_mask() -> None:
    logits = noise(0, 1, "bytes")
    logits[0, -1] = torch.nan  # of no token: the schema does not allow it anyway
    (found,) = sample(logits, [sampler_of("bytes", SCHEMA)])
    assert isinstance(found, ModelError)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$ref": "https://example.org/schema"}, "cannot be followed"),
        pytest.param({"const": object()}, "not JSON serializable", id="an object"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"json_schema .*{said}"):
        GRAMMARS["bytes"].matcher(schema)


@pytest.mark.parametrize("depth", [200, 100_000])
def test_a_schema_that_is_nested_too_deeply_is_refused(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    with pytest.raises(InputError, match=r"json_schema .*recursion"):
        GRAMMARS["bytes"].matcher(schema)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("schema", [["a"], 5, "{}"], ids=str)
def test_a_schema_that_is_no_mapping_is_refused(schema: Any) -> None:
    with pytest.raises(InputError, match="json_schema is no JSON object"):
        GRAMMARS["bytes"].matcher(schema)


def test_a_token_that_is_not_allowed_is_refused() -> None:
    matcher = GRAMMARS["bytes"].matcher({"type": "integer"})
    with pytest.raises(InputError, match="not allowed by json_schema"):
        matcher.accept(TOKENIZERS["bytes"].convert_tokens_to_ids("x"))
    with pytest.raises(InputError, match="any further"):
        matcher.allowed()


def test_a_request_whose_schema_became_too_much_fails_alone() -> None:
    broken = sampler_of("bytes", {"type": "integer"})
    assert broken.matcher is not None
    with pytest.raises(InputError):
        broken.matcher.accept(TOKENIZERS["bytes"].convert_tokens_to_ids("x"))
    first, second = sample(noise(0, 2, "bytes"), [broken, Sampler(SamplingParams())])
    assert isinstance(first, InputError)
    assert isinstance(second, Sampled)


def test_a_tokenizer_that_cannot_be_read_is_refused_with_the_reason() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="without json_schema"):
        Grammar(PreTrainedTokenizerFast(tokenizer_object=backend), vocab=2, end_ids=[0])


def test_a_model_whose_answers_never_end_is_refused() -> None:
    with pytest.raises(ModelError, match="end_ids"):
        Grammar(TOKENIZERS["bytes"], vocab=300, end_ids=[])


def test_without_llguidance_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install 'kvlink\[json\]'"):
        Grammar(TOKENIZERS["bytes"], vocab=300, end_ids=[2])
