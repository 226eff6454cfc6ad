"""GGUF: header, dequantisation, names, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.errors import StartupError
from octavo.core.spec import LayerSpec, RopeSpec
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf import CHUNK_BLOCKS, GgufSource, hf_name
from octavo.weights.gguf_header import (
    TYPES,
    GgufHeader,
    TensorInfo,
    config_from_gguf,
    llama3_divisors,
    read_header,
)
from octavo.weights.spec import spec_from_config
from tests.fakes.tiny import make_tiny_gguf, tiny_config

QUANTS = gguf.GGMLQuantizationType
READABLE = [
    "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4",
]  # fmt: skip


def write_llama(path: Path, **metadata: Any) -> Path:
    """A tiny Llama whose metadata keys (``arch__key`` for ``llama.key``) are set, or dropped."""
    make_tiny_gguf(path)
    reader = gguf.GGUFReader(path)
    changes = {
        name.replace("arch__", "llama.").replace("__", "."): v for name, v in metadata.items()
    }
    writer = gguf.GGUFWriter(str(path) + ".new", changes.pop("general.architecture", "llama"))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in changes:
            writer.add_key_value(key, field.contents(), field.types[0])
    for key, value in changes.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(str(path) + ".new").replace(path)


def refusal(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        dict(open_checkpoint(path).tensors())
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_type_table_is_that_of_the_gguf_package() -> None:
    theirs = {int(t): (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in QUANTS}
    assert {kind: row for kind, row in TYPES.items() if kind in theirs} == theirs


def test_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, quant="Q8_0")
    header, theirs = read_header(path), gguf.GGUFReader(path)
    assert {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")} == (
        header.metadata
    )
    assert list(header.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parametrize("quant", READABLE)
def test_every_type_gives_the_packages_values(tmp_path: Path, quant: str) -> None:
    """Random bytes are valid blocks of every type (NaN scales included)."""
    kind = QUANTS[quant]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    width = max(per_block, 256)
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (6, width // per_block * block_bytes), dtype=np.uint8)
    path = tmp_path / "blocks"
    path.write_bytes(b"skip" + raw.tobytes())
    info = TensorInfo((6, width), int(kind), 4, raw.nbytes)
    source = GgufSource(GgufHeader(path, {}, {"output.weight": info}), 1, 1)
    with np.errstate(all="ignore"):
        ((name, tensor),) = source.tensors()
        expected = dequantize(raw, kind)
    assert name == "lm_head.weight"
    assert tensor.shape == (6, width)
    np.testing.assert_array_equal(tensor.float().numpy(), expected)


def test_many_chunks(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    rows = CHUNK_BLOCKS + 5
    values = random.standard_normal((rows, 64), dtype=np.float32)
    packed = gguf.quants.quantize(values, QUANTS.Q8_0)
    (tmp_path / "blocks").write_bytes(packed.tobytes())
    info = TensorInfo((rows, 64), int(QUANTS.Q8_0), 0, packed.nbytes)
    source = GgufSource(GgufHeader(tmp_path / "blocks", {}, {"output.weight": info}), 1, 1)
    exact = torch.from_numpy(dequantize(packed, QUANTS.Q8_0))
    for dtype in (torch.float32, torch.bfloat16):
        ((_, tensor),) = source.tensors(dtype)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, exact.to(dtype))


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_tensors_under_their_names(tmp_path: Path, family: str, quant: str) -> None:
    expected = make_tiny_gguf(tmp_path / "m.gguf", family, quant=quant)
    tensors = dict(open_checkpoint(tmp_path / "m.gguf").tensors())
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.float(), expected[name]), name


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_spec_is_that_of_the_folder(tmp_path: Path, family: str) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", family)
    spec = open_checkpoint(tmp_path / "m.gguf").spec
    own = "llama" if family == "mistral" else family
    ours = spec_from_config(tiny_config(own, tie=family.startswith("qwen")))
    assert spec.norm_eps == pytest.approx(ours.norm_eps)
    for field in set(ours.__slots__) - {"norm_eps"}:
        assert getattr(spec, field) == getattr(ours, field), field


@pytest.mark.parametrize(
    ("quant", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q4_0", "bfloat16")]
)
def test_dtype(tmp_path: Path, quant: str, dtype: str) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", quant=quant)
    assert open_checkpoint(tmp_path / "m.gguf").spec.dtype == dtype


def test_llama_biases_are_permuted_too(tmp_path: Path) -> None:
    expected = make_tiny_gguf(tmp_path / "m.gguf", attention_bias=True)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert (checkpoint.spec.qkv_bias, checkpoint.spec.o_bias) == (True, True)
    name = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(dict(checkpoint.tensors())[name], expected[name])


def test_overrides_reach_a_gguf_file(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", max_position=32768)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = open_checkpoint(tmp_path / "m.gguf", overrides={"rope_scaling": yarn}).spec
    assert (spec.max_position, spec.rope.kind) == (131072, "yarn")


def test_stop_ids_of_turns_count(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", tokenizer__ggml__eot_token_id=7)
    assert open_checkpoint(path).spec.eos_ids == (2, 7)


def test_yarn(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "m.gguf",
        **{
            "arch__rope.scaling.type": "yarn",
            "arch__rope.scaling.factor": 4.0,
            "arch__rope.scaling.original_context_length": 512,
        },
    )
    spec = open_checkpoint(path).spec
    assert (spec.rope.kind, spec.rope.factor, spec.max_position) == ("yarn", 4.0, 2048)


def test_llama3_scaling_is_recognised(tmp_path: Path) -> None:
    divisors = np.array(llama3_divisors(10_000.0, 16, 8.0), dtype=np.float32)
    assert divisors[0] == 1
    assert divisors[-1] == pytest.approx(8)
    path = write_llama(tmp_path / "m.gguf", **{"rope_freqs.weight": divisors})
    checkpoint = open_checkpoint(path)
    rope = checkpoint.spec.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 8.0, 8192)
    assert "rope_freqs.weight" not in dict(checkpoint.tensors())
    path = write_llama(tmp_path / "n.gguf", **{"rope_freqs.weight": divisors[::-1].copy()})
    assert "rope_freqs.weight" in refusal(path)


def test_window_of_a_qwen(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", "qwen2")
    header = read_header(tmp_path / "m.gguf")
    meta = {**header.metadata, "qwen2.attention.sliding_window": 64}
    config = config_from_gguf(GgufHeader(header.path, meta, header.tensors))
    assert spec_from_config(config).layers == (LayerSpec("sliding", window=64),) * 2


@pytest.mark.parametrize(("layers", "scalar"), [(18, 256), (62, 168)], ids=["270m", "27b"])
def test_what_a_gemma_file_leaves_unsaid(tmp_path: Path, layers: int, scalar: int) -> None:
    """The local RoPE base, the pattern of sliding layers and the query scalar."""
    heads = {"hidden_size": 336, "num_attention_heads": 2, "head_dim": 256}
    make_tiny_gguf(tmp_path / "m.gguf", "gemma3_text", rope_theta=1e6, **heads)
    header = read_header(tmp_path / "m.gguf")
    meta = {**header.metadata, "gemma3.block_count": layers}
    meta |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    spec = spec_from_config(config_from_gguf(GgufHeader(header.path, meta, header.tensors)))
    assert [i for i, layer in enumerate(spec.layers) if layer.mixer == "full"] == (
        list(range(5, layers, 6))
    )
    assert spec.layers[0].window == 24
    assert spec.attention_scale == scalar**-0.5
    assert spec.local_rope == RopeSpec(10_000.0, 256)
    assert (spec.rope.theta, spec.rope.kind, spec.rope.factor) == (1e6, "linear", 8.0)
    assert spec.max_position == 512


def test_soft_caps_in_a_file_are_refused(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", "gemma3_text")
    header = read_header(tmp_path / "m.gguf")
    meta = {**header.metadata, "gemma3.final_logit_softcapping": 30.0}
    config = config_from_gguf(GgufHeader(header.path, meta, header.tensors))
    with pytest.raises(StartupError, match="final_logit_softcapping of logits is not supported"):
        spec_from_config(config)


def test_unknown_names_are_kept() -> None:
    assert hf_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert hf_name("blk.3.ffn_gate_exps.weight") == "blk.3.ffn_gate_exps.weight"
    assert hf_name("x") == "x"


# -- refused


CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    ({"general__architecture": "gpt2"}, ["gpt2", "llama, qwen2, qwen3, gemma3"]),
    ({"arch__expert_count": 8}, ["llama with experts"]),
    ({"arch__block_count": None}, ["llama.block_count is missing"]),
    ({"arch__context_length": "long"}, ["llama.context_length", "'long'"]),
    ({"arch__rope.scaling.type": "longrope", "arch__rope.scaling.factor": 2.0}, ["longrope"]),
    ({"arch__rope.scaling.type": "linear"}, ["llama.rope.scaling.factor is missing"]),
    ({"arch__rope.dimension_count": 8}, ["llama.rope.dimension_count", "16", "8"]),
    ({"split__count": 3}, ["one part of several"]),
    ({"arch__attention.head_count": 3}, ["3 attention heads", "2"]),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[str(c)[:40] for c, _ in CHANGES])
def test_refused(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    message = refusal(write_llama(tmp_path / "m.gguf", **change))
    for word in words:
        assert word in message


def test_cut_file_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path)
    last, data = list(read_header(path).tensors)[-1], path.read_bytes()
    path.write_bytes(data[:-100])
    assert f"tensor {last} ends at byte" in refusal(path)
    assert f"the file has {len(data) - 100} bytes" in refusal(path)


def test_type_that_nobody_unpacks(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(bytes(400))
    info = TensorInfo((1, 32), int(QUANTS.Q8_1), 0, 40)
    source = GgufSource(GgufHeader(path, {}, {"output.weight": info}), 1, 1)
    with pytest.raises(StartupError, match=r"tensor output\.weight has type Q8_1"):
        dict(source.tensors())


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_one_sentence(tmp_path: Path, data: st.DataObject) -> None:
    """Cut the file or write over its header: it opens and loads, or a StartupError names it."""
    whole, path = tmp_path / "whole.gguf", tmp_path / "m.gguf"
    if not whole.exists():
        make_tiny_gguf(whole, layers=1, quant="Q4_1")
        (tmp_path / "header_bytes").write_text(str(_header_bytes(whole)))
    raw = bytearray(whole.read_bytes())
    header_bytes = int((tmp_path / "header_bytes").read_text())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, header_bytes))
        patch = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
        raw[at : at + len(patch)] = patch
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    path.write_bytes(raw)
    try:
        dict(open_checkpoint(path).tensors())
    except StartupError as error:
        message = str(error)
    else:
        return
    assert str(path) in message


def _header_bytes(path: Path) -> int:
    return min(info.offset for info in read_header(path).tensors.values())


# -- against transformers, on the same file


def transformers_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_tensors_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    heads = {"qwen3": 128, "gemma3_text": 256}  # transformers takes no other
    head = {"head_dim": heads[family]} if family in heads else {}
    make_tiny_gguf(tmp_path / "m.gguf", family, quant="Q4_1", tie=False, **head)
    theirs = transformers_model(tmp_path / "m.gguf").state_dict()
    ours = dict(open_checkpoint(tmp_path / "m.gguf").tensors())
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.slow
def test_embedded_model_has_transformers_tensors(smollm2: Path) -> None:
    theirs = transformers_model(smollm2).state_dict()
    ours = dict(open_checkpoint(smollm2).tensors())
    assert set(theirs) - set(ours) == {"lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_embedded_models_numbers(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    spec = checkpoint.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads) == (30, 576, 9)
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (3, 64, 49152)
    assert (spec.max_position, spec.rope.theta, spec.tie_embeddings) == (8192, 100_000.0, True)
    assert (spec.bos_id, spec.eos_ids) == (1, (2,))
