"""A name changes with everything that decides an entry's numbers, and with nothing else."""

import os
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlink.core import fingerprint as module
from kvlink.core.fingerprint import SHARED, Identity, fingerprint, ids_bytes, is_fingerprint

claim = settings(derandomize=True, deadline=None)
ids = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=4).map(tuple)
words = st.text(st.sampled_from("0f:2") | st.characters(exclude_categories=["Cs"]), max_size=6)
FIELDS = {"model": words, "rope": words, "sink_ids": ids, "dtype": words, "scope": st.binary(min_size=16, max_size=16)}
identities = st.builds(Identity, **FIELDS)

GOLDEN = Identity(model="ab" * 32, rope="cd" * 32, sink_ids=(1, 2), dtype="bfloat16")
GOLDEN_IDS = (3, 50_000, 0)
GOLDEN_NAME = "a7107e08acc7022c38544bd18ef3d6686acbdd2cbf8522e136ca8d8c9dd9c006"


@claim
@given(st.data())
def test_changing_any_one_field_changes_the_name(data):
    identity, token_ids = data.draw(identities), data.draw(ids)
    name = fingerprint(identity, token_ids)
    for field in fields(Identity):
        value = data.draw(FIELDS[field.name])
        assume(value != getattr(identity, field.name))
        assert fingerprint(replace(identity, **{field.name: value}), token_ids) != name
    others = data.draw(ids)
    assume(others != token_ids)
    assert fingerprint(identity, others) != name


@claim
@given(identities, ids, st.integers(0, 4))
def test_equal_inputs_have_equal_names_whatever_holds_the_ids(identity, token_ids, kind):
    held = (
        list(token_ids),
        iter(token_ids),
        np.array(token_ids, dtype=np.int64).tolist(),
        (i for i in token_ids),
        token_ids,
    )
    assert fingerprint(replace(identity), held[kind]) == fingerprint(identity, token_ids)


@claim
@given(identities, ids, st.integers(0, 4), st.integers(0, 4))
def test_moving_ids_between_the_sink_prefix_and_the_document_changes_the_name(identity, run, left, right):
    assume(min(left, len(run)) != min(right, len(run)))
    names = {fingerprint(replace(identity, sink_ids=run[:cut]), run[cut:]) for cut in (left, right)}
    assert len(names) == 2


@claim
@given(identities, words, st.integers(0, 6), st.integers(0, 6))
def test_moving_letters_between_two_neighbouring_fields_changes_the_name(identity, text, left, right):
    assume(min(left, len(text)) != min(right, len(text)))
    names = {fingerprint(replace(identity, model=text[:cut], rope=text[cut:]), ()) for cut in (left, right)}
    assert len(names) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((1, 2), (3,)), ((1,), (2, 3))),
        (((), (1,)), ((1,), ())),
        (((), ()), ((), (0,))),
        (((0,), ()), ((0, 0), ())),
        (((1,), (1,)), ((1, 1), ())),
        (((), (1, 2)), ((), (2, 1))),
        (((), (1,)), ((), (1 << 32,))),
        (((), (-1,)), ((), (2**32 - 1,))),
    ],
)
def test_ids_that_concatenate_alike_have_different_names(one, other):
    names = {fingerprint(replace(GOLDEN, sink_ids=sink), token_ids) for sink, token_ids in (one, other)}
    assert len(names) == 2


def test_a_field_that_imitates_the_encoding_of_its_neighbour_has_a_name_of_its_own():
    honest = Identity(model="m", rope="r", sink_ids=(), dtype="float32")
    forged = replace(honest, model="mrope:1:r", rope="")
    assert fingerprint(honest, (1,)) != fingerprint(forged, (1,))


def test_the_format_is_part_of_the_name(monkeypatch):
    before = fingerprint(GOLDEN, GOLDEN_IDS)
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    assert fingerprint(GOLDEN, GOLDEN_IDS) != before


def test_the_name_of_a_fixed_input_never_changes_within_a_format():
    """A failure here means that every stored entry lost its name: count FORMAT up, then take the new value."""
    assert module.FORMAT == 1
    assert fingerprint(GOLDEN, GOLDEN_IDS) == GOLDEN_NAME


def test_the_encoding_is_tag_length_and_field_in_a_fixed_order():
    sink = b"\1" + bytes(7) + b"\2" + bytes(7)
    token_ids = b"\3" + bytes(7) + b"\x50\xc3" + bytes(6) + bytes(8)
    written = (
        b"format:1:1" + b"model:64:" + b"ab" * 32 + b"rope:64:" + b"cd" * 32 + b"sink:16:" + sink
        + b"dtype:8:bfloat16" + b"scope:16:" + bytes(16) + b"ids:24:" + token_ids
    )  # fmt: skip
    assert fingerprint(GOLDEN, GOLDEN_IDS) == blake3(written).hexdigest()


def test_the_name_is_the_same_in_processes_with_different_hash_seeds():
    code = f"from kvlink.core.fingerprint import Identity, fingerprint\nprint(fingerprint({GOLDEN!r}, {GOLDEN_IDS!r}))"
    names = set()
    for seed in ("0", "4711"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        found = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
        names.add(found.stdout.decode().strip())
    assert names == {fingerprint(GOLDEN, GOLDEN_IDS)}


@claim
@given(identities, ids)
def test_every_name_has_the_form_of_a_fingerprint(identity, token_ids):
    assert is_fingerprint(fingerprint(identity, token_ids))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 63,
        "a" * 65,
        "A" * 64,
        "g" + "a" * 63,
        "a" * 63 + "\n",
        "a" * 64 + "\n",
        "a" * 63 + "\0",
        "../" + "a" * 61,
        "/" + "a" * 63,
        "a" * 31 + "/." + "a" * 31,
        "a" * 32 + "\\" + "a" * 31,
        "." * 64,
        "\u0663" * 64,
        "\uff11" * 64,
        " " + "a" * 63,
    ],
    ids=ascii,
)
def test_nothing_that_could_lead_out_of_a_folder_passes_for_a_fingerprint(name):
    assert not is_fingerprint(name)


@claim
@given(st.text(st.sampled_from("0123456789abcdefABCDEFg/.\\\n"), min_size=63, max_size=65))
def test_only_64_lowercase_hex_digits_pass_for_a_fingerprint(name):
    expected = len(name) == 64 and set(name) <= set("0123456789abcdef")
    assert is_fingerprint(name) == expected


@claim
@given(ids)
def test_ids_are_written_as_little_endian_64_bit_integers(token_ids):
    assert ids_bytes(token_ids) == b"".join(token.to_bytes(8, "little", signed=True) for token in token_ids)


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_a_scope_of_another_length_than_16_bytes_is_refused(size):
    with pytest.raises(ValueError, match=f"a scope has 16 bytes, this one has {size}"):
        Identity(model="m", rope="r", sink_ids=(), dtype="float32", scope=bytes(size))


def test_the_shared_scope_is_the_default_and_all_zeros():
    assert GOLDEN.scope == SHARED == bytes(16)
