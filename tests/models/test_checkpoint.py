import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from kvlink.core.errors import KVLinkWarning, ModelError, ModelRefused
from kvlink.models import checkpoint
from kvlink.models.checkpoint import Checkpoint, checkpoint_of, context_length, converted, load
from kvlink.models.digest import model_digest, repair_rotary, rope_digest
from kvlink.models.prompt import Prompter

SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 128,
}
LAYERS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "longrope": ("phi3", {"rope_parameters": LONG}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "layer_types": LAYERS, "sliding_window": 16}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "glm": ("glm", {"head_dim": 8}),
}


def build(family="llama", **changes):
    kind, more = FAMILIES.get(family, (family, {}))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **more, **changes}))


def frequencies(model):
    return {name: table.clone() for name, table in model.named_buffers() if name.endswith("inv_freq")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    build().save_pretrained(path)
    tiny.byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


# --- loading ---------------------------------------------------------------------------------------------------------


def test_a_folder_gives_a_model_ready_to_compute_with_its_tokenizer_and_its_name(folder):
    found = load(folder, device="cpu")
    assert isinstance(found, Checkpoint)
    assert (found.name, found.context_length, found.end_ids, found.repaired) == (str(folder), 512, (2,), ())
    assert found.model.dtype == torch.float32
    assert found.model.config._attn_implementation == "sdpa"
    assert not found.model.training
    assert not any(weight.requires_grad for weight in found.model.parameters())
    assert found.tokenizer.chat_template == tiny.CHATML
    assert Prompter(tokenizer=found.tokenizer, end_ids=found.end_ids).system_ids()[0] == 1
    assert (found.digest, found.rope_digest) == (model_digest(build()), rope_digest(build()))


def test_a_model_loaded_in_16_bits_keeps_its_rotary_tables(folder):
    found = load(folder, dtype="bfloat16", device="cpu")
    assert found.model.dtype == torch.bfloat16
    assert found.repaired == ()
    assert found.rope_digest == rope_digest(build())
    assert found.digest != model_digest(build())


def test_a_model_with_a_softcap_attends_eagerly(tmp_path):
    build("gemma2", head_dim=8, layer_types=LAYERS).save_pretrained(tmp_path)
    assert load(tmp_path, device="cpu").model.config._attn_implementation == "eager"


def test_a_folder_without_tokenizer_gives_none(copy):
    for file in copy.glob("tokenizer*"):
        file.unlink()
    assert load(copy, device="cpu").tokenizer is None


def test_a_broken_tokenizer_is_an_error(copy):
    (copy / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(ModelError, match="Get its files again"):
        load(copy, device="cpu")


def test_missing_weights_are_refused_instead_of_random(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelRefused, match=r"lacks 9 weights \(model\.layers\.2"):
        load(copy, device="cpu")


@pytest.mark.parametrize("damage", ["truncated", "absent", "no config", "unknown"])
def test_a_damaged_folder_is_an_error_that_names_the_model(copy, damage):
    weights, config = copy / "model.safetensors", copy / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "unknown":
        config.write_text('{"model_type": "of another world"}')
    else:
        (weights if damage == "absent" else config).unlink()
    with pytest.raises(ModelError, match=r"copy' cannot be loaded: .*\n.*whole model"):
        load(copy, device="cpu")


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "~/no/such/model", "a/b/c"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_name(name):
    with pytest.raises(ModelError, match="no such folder"):
        load(name)


def test_a_hub_name_without_network_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="hf download someone/some-model"):
        load("someone/some-model", device="cpu")


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"dtype": "float33"}, {"device": "cuda"}])
def test_a_dtype_or_device_that_cannot_compute_is_an_error(folder, options, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"int8|float33|no GPU"):
        load(folder, **options)


def test_the_context_is_that_of_the_text_model_and_has_to_be_named():
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=99))
    assert context_length(config) == 99
    with pytest.raises(ModelRefused, match="bloom"):
        context_length(AutoConfig.for_model("bloom"))


@pytest.mark.parametrize(("ends", "shown"), [(7, (7,)), ([7, 9], (7, 9)), (None, (2,))])
def test_answers_end_where_the_generation_config_says_else_the_config(ends, shown):
    model = build()
    model.generation_config.eos_token_id = ends
    assert checkpoint_of(model).end_ids == shown


# --- digests ---------------------------------------------------------------------------------------------------------


def test_one_bit_of_one_weight_changes_the_digest():
    model = build()
    before = model_digest(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data.view(torch.int32)[3, 3] ^= 1
    assert model_digest(model) != before
    weight.data.view(torch.int32)[3, 3] ^= 1
    assert model_digest(model) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.5},
    ],
)
def test_a_config_that_can_change_numbers_changes_the_digest(changes):
    assert model_digest(build(**changes)) != model_digest(build())


def test_paths_attention_implementation_and_observers_leave_the_digest_alone():
    model = build()
    before = model_digest(model)
    model.config.name_or_path = "elsewhere"
    model.config.use_cache = False
    model.config.transformers_version = "9.9"
    model.set_attn_implementation("eager")
    assert model_digest(model) == before


def test_packed_integers_persistent_buffers_and_scalars_count():
    model = nn.Module()
    model.register_buffer("packed", torch.arange(6, dtype=torch.uint8).reshape(2, 3))
    model.register_buffer("scale", torch.tensor(2.0, dtype=torch.bfloat16))
    model.register_buffer("passing", torch.zeros(3), persistent=False)
    first = model_digest(model)
    model.passing += 1
    assert model_digest(model) == first
    model.packed[0, 0] = 9
    assert model_digest(model) != first


def test_an_adapter_counts_with_its_weights_its_settings_and_whether_it_is_on():
    model, digests = build(), set()
    digests.add(model_digest(model))
    layer = model.model.layers[0].self_attn.k_proj
    layer.lora_A = nn.Linear(32, 2, bias=False)
    layer.active_adapters, layer.disable_adapters, layer.scaling = ["a"], False, {"a": 2.0}
    digests.add(model_digest(model))
    model.peft_config = {"a": SimpleNamespace(to_dict=lambda: {"lora_alpha": 16, "path": "x"})}
    digests.add(model_digest(model))
    layer.scaling = {"a": 1.0}
    digests.add(model_digest(model))
    layer.disable_adapters = True
    digests.add(model_digest(model))
    assert len(digests) == 5


def test_weights_that_are_not_in_memory_have_no_digest():
    with torch.device("meta"):
        model = build()
    with pytest.raises(ModelRefused, match="not in memory"):
        model_digest(model)


def test_the_rope_digest_follows_frequencies_and_scaling_only():
    digests = {name: rope_digest(build(name)) for name in ("llama", "llama3", "yarn", "longrope", "gemma3", "phi")}
    assert len(set(digests.values())) == len(digests)
    assert rope_digest(build(hidden_act="gelu", initializer_range=0.5)) == digests["llama"]
    patched = build()
    patched.model.rotary_emb.inv_freq *= 0.5
    assert rope_digest(patched) != digests["llama"]
    patched = build("yarn")
    patched.model.rotary_emb.attention_scaling *= 2
    assert rope_digest(patched) != digests["yarn"]


# --- rotary repair ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", [None, torch.float32], ids=["bfloat16", "and back"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_tables_that_a_cast_has_rounded_are_restored_to_the_bit(family, back):
    model = build(family)
    right = frequencies(model)
    model.to(torch.bfloat16).to(back or torch.bfloat16)
    assert any(not torch.equal(table.float(), right[name]) for name, table in frequencies(model).items())
    repaired = repair_rotary(model)
    assert repaired
    assert all(torch.equal(table, right[name]) for name, table in frequencies(model).items())
    assert repair_rotary(model) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_sound_tables_are_left_alone_also_in_float64(family):
    assert repair_rotary(build(family)) == []
    assert repair_rotary(build(family).double()) == []


def test_a_checkpoint_around_a_cast_model_is_repaired_and_says_so():
    found = checkpoint_of(build().to(torch.float16))
    assert found.repaired[0].startswith("model.rotary_emb.inv_freq: was wrong by ")
    assert found.rope_digest == rope_digest(build())


@pytest.mark.parametrize(("kind", "rope"), [("llama", DYNAMIC), ("phi3", LONG)], ids=["dynamic", "longrope"])
def test_a_table_that_the_model_itself_has_changed_is_in_order(kind, rope):
    model = build(kind, rope_parameters=rope, original_max_position_embeddings=128)
    right, name = frequencies(model), rope_digest(model)
    module = model.model.rotary_emb
    module(torch.zeros(1), torch.arange(2000)[None])
    assert any(not torch.equal(table, right[key]) for key, table in frequencies(model).items())
    assert repair_rotary(model) == []
    assert rope_digest(model) == name
    model.to(torch.bfloat16)
    assert repair_rotary(model)
    assert all(torch.equal(table, right[key]) for key, table in frequencies(model).items())
    assert getattr(module, "max_seq_len_cached", 512) == 512


def test_a_rounded_table_that_cannot_be_rebuilt_is_refused():
    class Foreign(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.register_buffer("inv_freq", 1 / torch.arange(1, dim + 1))

    assert repair_rotary(nn.Sequential(Foreign(4))) == []
    with pytest.raises(ModelRefused, match=r"0\.inv_freq is no longer float32"):
        repair_rotary(nn.Sequential(Foreign(4)).to(torch.bfloat16))


# --- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """A cache folder of its own, and conversion replaced by writing two small files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = []

    def write(gguf, target):
        made.append(gguf)
        target.mkdir()
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"weights of " + gguf.read_bytes())

    monkeypatch.setattr(checkpoint, "_dequantise", write)
    return made


def gguf(tmp_path, content=b"GGUF"):
    path = tmp_path / "some.gguf"
    path.write_bytes(content)
    return path


def test_a_gguf_file_is_converted_once(conversions, tmp_path):
    first = converted(gguf(tmp_path))
    assert converted(gguf(tmp_path)) == first
    assert first.is_relative_to(tmp_path / "cache/kvlink/models")
    assert len(conversions) == 1


def test_other_bytes_are_another_conversion(conversions, tmp_path):
    assert converted(gguf(tmp_path)) != converted(gguf(tmp_path, b"FUGG"))
    assert len(conversions) == 2


@pytest.mark.parametrize("damage", ["bit", "truncated", "absent", "no manifest", "empty manifest", "no folder"])
def test_a_damaged_conversion_is_made_again(conversions, tmp_path, damage):
    folder = converted(gguf(tmp_path))
    weights, manifest = folder / "model.safetensors", folder / "digests.json"
    right = weights.read_bytes()
    match damage:
        case "bit":
            weights.write_bytes(b"W" + right[1:])
        case "truncated":
            weights.write_bytes(right[:-1])
        case "absent":
            weights.unlink()
        case "no manifest":
            manifest.unlink()
        case "empty manifest":
            manifest.write_text("{}")
        case _:
            shutil.rmtree(folder)
    assert converted(gguf(tmp_path)) == folder
    assert weights.read_bytes() == right
    assert len(conversions) == 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_conversion_that_fails_leaves_nothing_behind(conversions, tmp_path, monkeypatch):
    def fail(gguf, target):
        target.mkdir()
        (target / "half").write_bytes(b"half")
        raise ValueError("GGUF magic invalid")

    monkeypatch.setattr(checkpoint, "_dequantise", fail)
    with pytest.raises(ModelError, match="magic invalid"):
        converted(gguf(tmp_path))
    assert list((tmp_path / "cache/kvlink/models").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable(conversions, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        converted(gguf(tmp_path))


def test_a_file_that_is_no_gguf_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="cannot be converted"):
        load(gguf(tmp_path, b"not at all a GGUF file" * 10))
    with pytest.raises(ModelError, match="cannot be converted"):
        load(tmp_path / "absent.gguf")


# --- the demo model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo():
    return load("demo", device="cpu")


def test_the_demo_model_of_the_hub_is_never_taken_in_silence(monkeypatch):
    def absent(source: str, **options: object) -> None:
        raise OSError(f"no network for {source}")

    monkeypatch.setattr(checkpoint, "DEMO_PACKAGE", "no_such_package")
    monkeypatch.setattr(AutoConfig, "from_pretrained", absent)
    with pytest.warns(KVLinkWarning, match="no link tokens ship for it"), pytest.raises(ModelError, match="no network"):
        load("demo")


@pytest.mark.demo
def test_the_demo_model_comes_from_the_package_without_importing_it(demo):
    assert checkpoint.DEMO_PACKAGE not in sys.modules
    assert (demo.name, demo.context_length) == ("SmolLM2-135M-Instruct.Q4_1.gguf", 8192)
    assert (demo.end_ids, demo.repaired) == ((2,), ())
    assert demo.model.dtype == torch.float32


@pytest.mark.demo
def test_the_demo_models_template_and_special_tokens_survive(demo):
    assert demo.tokenizer.chat_template == tiny.CHATML
    assert (demo.tokenizer.bos_token, demo.tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    prompter = Prompter(tokenizer=demo.tokenizer, end_ids=demo.end_ids)
    assert prompter.control_ids == set(range(17))
    assert prompter.end_ids == (2,)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    whole = demo.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert [*prompter.system_ids(), *prompter.tail_ids("What is the capital of France?")] == whole


@pytest.mark.demo
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_conversation_has_the_ids_of_the_demo_models_template(demo, system):
    prompter = Prompter(tokenizer=demo.tokenizer, end_ids=demo.end_ids)
    chat = [{"role": "system", "content": system}] if system else []
    chat += [{"role": "user", "content": "What is the capital of France?"}]
    chat += [{"role": "assistant", "content": "The capital of France is Paris."}]
    chat += [{"role": "user", "content": "How many people live there?"}]
    whole = demo.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    question, answer, last = (message["content"] for message in chat[-3:])
    generated = prompter.answer_ids(answer)
    assert generated[-1] == 2
    for ids in (generated, generated[:-1]):
        told = [*prompter.system_ids(system), *prompter.turn_ids(question, ids), *prompter.tail_ids(last)]
        assert told == whole
    system_ids, tails = prompter.conversation(chat)
    assert [*system_ids, *tails[0], *tails[1]] == whole


@pytest.mark.demo
def test_the_demo_model_answers_sensibly(demo):
    prompter = Prompter(tokenizer=demo.tokenizer, end_ids=demo.end_ids)
    ids = torch.tensor([[*prompter.system_ids(), *prompter.tail_ids("What is the capital of France?")]])
    answer = demo.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert prompter.decode(answer[0, ids.shape[1] :].tolist()) == "The capital of France is Paris."
