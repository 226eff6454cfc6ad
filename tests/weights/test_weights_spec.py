"""config.json to ModelSpec."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import StartupError
from octavo.core.spec import LayerSpec, ModelSpec, RopeSpec
from octavo.weights.spec import spec_from_config
from tests.fakes.tiny import ARCHITECTURES, tiny_config

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


# -- the same numbers as transformers


def transformers_config(family: str, **values: Any) -> dict[str, Any]:
    """What transformers itself would write to config.json."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **values)
    config.architectures = [ARCHITECTURES[family]]
    return json.loads(config.to_json_string(use_diff=False))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 2048},
    {"rope_theta": 500_000.0, "tie_word_embeddings": True},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {**YARN, "rope_type": "yarn"}, "max_position_embeddings": 131072},
    {"rope_scaling": dict(LLAMA3), "max_position_embeddings": 131072, "eos_token_id": [7, 9]},
]


@pytest.mark.parametrize("values", VARIANTS, ids=range(len(VARIANTS)))
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_numbers_are_those_of_transformers(family: str, values: dict[str, Any]) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family, **json.loads(json.dumps(values)))
    spec = spec_from_config(transformers_config(family, **json.loads(json.dumps(values))))
    rope = theirs.rope_parameters
    if family == "gemma3_text":
        local, rope = rope["sliding_attention"], rope["full_attention"]
        assert spec.local_rope == RopeSpec(local["rope_theta"], spec.head_dim)
        assert spec.attention_scale == theirs.query_pre_attn_scalar**-0.5
        assert spec.max_position == theirs.max_position_embeddings, "scaling included"
    assert spec.family == family
    assert spec.hidden_size == theirs.hidden_size
    assert spec.num_layers == theirs.num_hidden_layers
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // spec.num_heads)
    assert spec.tie_embeddings == theirs.tie_word_embeddings
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.rope.theta == rope["rope_theta"]
    assert spec.rope.kind == rope["rope_type"]
    assert spec.rope.factor == rope.get("factor", 1.0)
    assert spec.rope.dim == spec.head_dim
    if spec.rope.kind in ("yarn", "llama3"):
        assert spec.rope.original_max_position == rope["original_max_position_embeddings"]
    eos = theirs.eos_token_id
    assert spec.eos_ids == tuple([eos] if isinstance(eos, int) else eos or ())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("first", [0, 3, 8, 28])
def test_sliding_layers_are_those_of_transformers(family: str, first: int) -> None:
    from transformers import AutoConfig

    values = {"use_sliding_window": True, "max_window_layers": first, "num_hidden_layers": 8}
    theirs = AutoConfig.for_model(family, **values).layer_types
    config = without(transformers_config(family, **values), "layer_types")
    layers = spec_from_config(config).layers
    assert ["sliding_attention" if x.mixer == "sliding" else "full_attention" for x in layers] == (
        theirs
    )
    assert spec_from_config({**config, "layer_types": theirs}).layers == layers


@pytest.mark.parametrize("every", [1, 2, 6])
def test_gemma_layers_are_those_of_transformers(every: int) -> None:
    from transformers import AutoConfig

    values = {"num_hidden_layers": 8, "sliding_window_pattern": every, "sliding_window": 512}
    theirs = AutoConfig.for_model("gemma3_text", **values).layer_types
    typed = transformers_config("gemma3_text", **values)
    layers = spec_from_config(typed).layers
    assert [f"{layer.mixer}_attention" for layer in layers] == theirs
    assert {layer.window for layer in layers if layer.mixer == "sliding"} <= {512}
    assert spec_from_config({**without(typed, "layer_types"), **values}).layers == layers


def test_gemma_config_of_the_first_releases() -> None:
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    spec = spec_from_config(tiny_config("gemma3_text", **old))
    assert spec.local_rope == RopeSpec(5e3, 16)
    assert spec.rope == RopeSpec(1e6, 16, "linear", 8.0, original_max_position=512)
    new = {
        "full_attention": {**old["rope_scaling"], "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    config = without(tiny_config("gemma3_text", rope_parameters=new), "rope_theta")
    assert spec_from_config(config) == spec
    changed = spec_from_config(config, overrides={"rope_theta": 2e6})
    assert changed.rope.theta == 2e6
    assert changed.local_rope == spec.local_rope


@pytest.mark.parametrize("family", [f for f in ARCHITECTURES if f != "gemma3_text"])
def test_old_spelling_is_the_new_one(family: str) -> None:
    old = tiny_config(family, rope_theta=77_000.0, rope_scaling=dict(YARN))
    rope = {**without(YARN, "type"), "rope_type": "yarn", "rope_theta": 77_000.0}
    new = {**without(old, "rope_scaling", "rope_theta"), "rope_parameters": rope}
    assert spec_from_config(old) == spec_from_config(new)


# -- families


def test_biases_and_norms_follow_the_family() -> None:
    def flags(family: str, **config: Any) -> tuple[bool, bool, bool, bool]:
        spec = spec_from_config(tiny_config(family, **config))
        return spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm

    assert flags("llama") == (False, False, False, False)
    assert flags("llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("mistral", attention_bias=True) == (False, False, False, False)
    assert flags("qwen2") == (True, False, False, False)
    assert flags("qwen3") == (False, False, False, True)
    assert flags("qwen3", attention_bias=True) == (True, True, False, True)
    assert flags("gemma3_text") == (False, False, False, True)


def test_model_type_decides_without_architectures() -> None:
    config = without(tiny_config("qwen2"), "architectures")
    assert spec_from_config(config).architecture == "Qwen2ForCausalLM"


def test_mistral_window() -> None:
    def layer(**config: Any) -> LayerSpec:
        return spec_from_config(tiny_config("mistral", max_position=8192, **config)).layers[1]

    assert layer(sliding_window=4096) == LayerSpec("sliding", window=4096)
    assert layer(sliding_window=None) == LayerSpec()
    assert layer(sliding_window=8192) == LayerSpec(), "the window is the whole context"
    config = without(tiny_config("mistral", max_position=8192), "sliding_window")
    assert spec_from_config(config).layers[0].window == 4096, "the class's default"


def test_window_needs_use_sliding_window() -> None:
    config = tiny_config("qwen2", sliding_window=64, max_window_layers=0)
    assert spec_from_config(config).layers == (LayerSpec(), LayerSpec())
    config["use_sliding_window"] = True
    assert spec_from_config(config).layers[0] == LayerSpec("sliding", window=64)


def test_eos_is_the_union_of_both_files() -> None:
    config = tiny_config(eos_token_id=2)
    assert spec_from_config(config, {"eos_token_id": [2, 7]}).eos_ids == (2, 7)
    assert spec_from_config(config, {"eos_token_id": 5}).eos_ids == (2, 5)
    config["eos_token_id"] = None
    assert spec_from_config(config, {"bos_token_id": 1}).eos_ids == ()


def test_dtype_in_both_spellings() -> None:
    assert spec_from_config(tiny_config(dtype="bfloat16")).dtype == "bfloat16"
    config = {**without(tiny_config(), "torch_dtype"), "dtype": "float16"}
    assert spec_from_config(config).dtype == "float16"


# -- rope


def test_yarn_extends_the_length() -> None:
    config = tiny_config(max_position=32768, rope_theta=1e6, rope_scaling=dict(YARN))
    spec = spec_from_config(config)
    assert spec.max_position == 131072
    assert spec.rope == RopeSpec(1e6, 16, "yarn", 4.0, original_max_position=32768)


def test_linear_and_dynamic_stretch_and_llama3_does_not() -> None:
    def spec(rope: dict[str, Any]) -> ModelSpec:
        return spec_from_config(tiny_config(max_position=4096, rope_scaling=rope))

    assert spec({"type": "linear", "factor": 4.0}).max_position == 16384
    dynamic = spec({"type": "dynamic", "factor": 2.0})
    assert (dynamic.max_position, dynamic.rope.original_max_position) == (8192, 4096)
    assert spec(LLAMA3).max_position == 4096
    assert spec({"rope_type": "default"}).rope == RopeSpec(10_000.0, 16)


@pytest.mark.parametrize("base", [{}, {"rope_scaling": {"type": "linear", "factor": 2.0}}])
def test_override_and_config_say_the_same(base: dict[str, Any]) -> None:
    direct = tiny_config(max_position=32768, rope_theta=1e6, rope_scaling=dict(YARN))
    old = tiny_config(max_position=32768, rope_theta=1e6, **base)
    assert spec_from_config(old, overrides={"rope_scaling": YARN}) == spec_from_config(direct)
    new = {
        **without(old, "rope_theta", "rope_scaling"),
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    }
    assert spec_from_config(new, overrides={"rope_scaling": YARN}) == spec_from_config(direct)
    assert spec_from_config(new, overrides={"rope_parameters": YARN}) == spec_from_config(direct)


def test_override_of_theta_alone() -> None:
    new = without(tiny_config(), "rope_theta")
    new["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}
    spec = spec_from_config(new, overrides={"rope_theta": 5e5})
    assert (spec.rope.theta, spec.rope.kind) == (5e5, "linear")


def test_overrides_replace_top_level_keys() -> None:
    spec = spec_from_config(
        tiny_config(), {"eos_token_id": 5}, {"num_hidden_layers": 1, "eos_token_id": 9}
    )
    assert (spec.num_layers, len(spec.layers), spec.eos_ids) == (1, 1, (9, 5))


# -- refused, by name


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3"]),
    ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
    ({"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
    ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "'awq'"]),
    ({"hidden_size": None}, ["hidden_size", "missing"]),
    ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "between 1 and", "0"]),
    ({"num_hidden_layers": 10**12}, ["num_hidden_layers", "1000000000000"]),
    ({"rope_scaling": {"type": "linear", "factor": 1e300}}, ["factor", "1e+300"]),
    ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads", "4", "3"]),
    ({"head_dim": None, "hidden_size": 66}, ["hidden_size", "66"]),
    ({"head_dim": 15}, ["head_dim", "15"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn"]),
    ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
    ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, ["rope_type", "'su'", "yarn"]),
    ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor", "missing"]),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
    ({"rope_scaling": {"full_attention": {"rope_type": "yarn"}}}, ["full_attention"]),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        ["original_max_position_embeddings", "missing"],
    ),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, ["low_freq_factor", "missing"]),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor", "1"]),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[str(c)[:50] for c, _ in REFUSED])
def test_refused(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(StartupError) as caught:
        spec_from_config(tiny_config() | change, file="some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_gemma_in_float16_is_computed_in_bfloat16() -> None:
    assert spec_from_config(tiny_config("gemma3_text", dtype="float16")).dtype == "bfloat16"
    assert spec_from_config(tiny_config("qwen3", dtype="float16")).dtype == "float16"


GEMMA_REFUSED = [
    ({"architectures": ["Gemma3ForConditionalGeneration"]}, "has a vision tower"),
    ({"architectures": None, "model_type": "gemma3"}, "has a vision tower"),
    ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM is not supported"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping of logits is not supported"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping of attention is not supported"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ({"hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh', not 'silu'"),
]


@pytest.mark.parametrize(("change", "words"), GEMMA_REFUSED, ids=[w for _, w in GEMMA_REFUSED])
def test_gemmas_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=re.escape(words)):
        spec_from_config({**tiny_config("gemma3_text"), **change})


def test_layer_types_are_checked() -> None:
    config = tiny_config("qwen3", layer_types=["full_attention"])
    with pytest.raises(StartupError, match="layer_types must name 2 layers, not 1"):
        spec_from_config(config)
    config["layer_types"] = ["full_attention", "linear_attention"]
    with pytest.raises(StartupError, match="'linear_attention'"):
        spec_from_config(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(family=st.sampled_from(sorted(ARCHITECTURES)), data=st.data())
def test_any_value_gives_a_spec_or_a_sentence(family: str, data: st.DataObject) -> None:
    config = tiny_config(family, rope_scaling=dict(YARN), layer_types=["full_attention"] * 2)
    key = data.draw(st.sampled_from(sorted(config)))
    inside = config[key] if isinstance(config[key], dict) and data.draw(st.booleans()) else config
    inside[data.draw(st.sampled_from(sorted(inside))) if inside is not config else key] = data.draw(
        JSON
    )
    try:
        spec = spec_from_config(config)
    except StartupError as error:
        message = str(error)
    else:
        assert len(spec.layers) == spec.num_layers
        return
    assert message.startswith("config.json: ")
