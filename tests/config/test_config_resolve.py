"""resolve(): numbers for every auto, and refusals with figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.facts import Gpu, HostFacts
from octavo.config.load import OptionError, load_options
from octavo.config.resolve import CPU_KV_BYTES, GIB, Config, resolve, resolve_measured
from octavo.config.summary import render_summary
from octavo.core.capacity import MemoryUse, cache_layout
from octavo.core.errors import StartupError
from octavo.core.spec import LayerSpec, ModelSpec, RopeSpec

# The figures of SmolLM2-135M: 22.5 KiB of bfloat16 KV a token.
SMALL = ModelSpec(
    family="llama",
    architecture="LlamaForCausalLM",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position=8192,
    norm_eps=1e-5,
    rope=RopeSpec(theta=1e5, dim=64),
    layers=(LayerSpec(),) * 30,
    tie_embeddings=True,
)
PAGE_BYTES = 16 * 22.5 * 1024
LONG = replace(SMALL, max_position=32768)
LAPTOP = HostFacts(cpu_count=4, total_bytes=16 * GIB, available_bytes=12 * GIB)
WITH_GPU = replace(LAPTOP, gpus=(Gpu("Some GPU", 24 * GIB, 23 * GIB),))


def config(spec: ModelSpec = SMALL, facts: HostFacts = LAPTOP, **given: Any) -> Config:
    return resolve(load_options(given, {}), facts, spec)


def refusal(spec: ModelSpec = SMALL, facts: HostFacts = LAPTOP, **given: Any) -> str:
    with pytest.raises(StartupError) as caught:
        config(spec, facts, **given)
    return str(caught.value)


def test_graphs_hold_more_tokens_where_a_model_is_small() -> None:
    roomy = replace(WITH_GPU, gpus=(Gpu("Some GPU", 90 * GIB, 90 * GIB),))
    middle = replace(SMALL, hidden_size=8192)
    large = replace(middle, intermediate_size=28672)
    specs = (SMALL, middle, large)
    tokens = [config(spec, roomy).max_graph_tokens for spec in specs]
    assert tokens[0] == 2560
    assert 512 < tokens[1] < 2560
    assert tokens[2] == 512
    assert config(SMALL, WITH_GPU, max_graph_tokens="0").max_graph_tokens == 0


def test_fp8_keys_and_values_nearly_double_the_tokens() -> None:
    plain, small = (config(kv_cache_memory="1GiB", kv_cache_dtype=d) for d in ("auto", "fp8"))
    assert (plain.kv_cache_dtype, small.kv_cache_dtype) == ("bfloat16", "fp8")
    assert plain.dtype == small.dtype == "bfloat16"
    assert plain.weight_bytes == small.weight_bytes
    assert small.num_pages == GIB // int(PAGE_BYTES * (64 + 2) / 128)  # a byte each, 2 a vector
    assert small.kv_cache_tokens == (small.num_pages - 1) * 16
    assert small.max_concurrency == pytest.approx(plain.max_concurrency * 128 / 66, rel=1e-2)
    assert config(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    assert config(dtype="float32").kv_cache_dtype == "float32"
    assert "one of auto, fp8" in refusal(kv_cache_dtype="fp4")


def test_nothing_is_left_open() -> None:
    made = config()
    assert (made.device, made.dtype, made.cpu_threads) == ("cpu", "bfloat16", 4)
    assert (made.max_model_len, made.max_num_seqs) == (8192, 256)
    assert made.kv_cache_memory <= CPU_KV_BYTES < made.kv_cache_memory + PAGE_BYTES
    assert made.kv_cache_tokens == (made.num_pages - 1) * 16
    assert "auto" not in [getattr(made, name) for name in ("kv_cache_tokens", "kv_cache_memory")]
    assert made.sources["device"] == "derived: no NVIDIA GPU here"


@pytest.mark.parametrize(
    ("own", "device", "expected"),
    [
        ("bfloat16", "cpu", "bfloat16"),
        ("float16", "cpu", "bfloat16"),
        ("float32", "cpu", "float32"),
        ("float16", "cuda", "float16"),
        ("float8_e4m3fn", "cpu", "bfloat16"),
    ],
)
def test_dtype_follows_the_checkpoint(own: str, device: str, expected: str) -> None:
    assert config(replace(SMALL, dtype=own), WITH_GPU, device=device).dtype == expected


def test_an_explicit_dtype_wins() -> None:
    made = config(dtype="half")
    assert made.dtype == "float16"
    assert made.sources["dtype"] == "flag --dtype"


def test_a_pool_of_459_pages_refuses_a_32k_model_and_says_what_fits() -> None:
    for length in ({}, {"max_model_len": "32768"}):
        message = refusal(LONG, kv_cache_tokens="7344", **length)
        assert "holds 7344 tokens" in message
        assert "32768" in message
        assert "--max-model-len 7344" in message
        assert "larger --kv-cache-tokens." in message
    assert "larger --kv-cache-memory." in refusal(LONG, kv_cache_memory="100MiB")


def test_auto_length_shrinks_to_the_pool() -> None:
    made = config(LONG, kv_cache_tokens="7344", max_model_len="auto")
    assert (made.max_model_len, made.num_pages) == (7344, 460)
    assert made.max_concurrency == 1.0
    assert config(LONG, max_model_len="-1").max_model_len == 32768


def test_a_length_beyond_the_model_is_refused_with_both_numbers() -> None:
    message = refusal(max_model_len="8193")
    assert "8193" in message
    assert "8192" in message


def test_the_default_pool_is_no_larger_than_all_sequences_need() -> None:
    made = config(max_num_seqs="2", max_model_len="1024")
    assert made.kv_cache_tokens == 2048
    assert made.max_concurrency == 2.0


def test_the_default_pool_holds_one_long_sequence() -> None:
    facts = replace(LAPTOP, available_bytes=2 * GIB)
    made = config(LONG, facts)
    assert made.kv_cache_tokens == 32768
    assert made.kv_cache_memory > 0.4 * 1.5 * GIB


def test_a_small_machine_refuses_a_long_context_or_shrinks_it() -> None:
    facts = replace(LAPTOP, available_bytes=int(1.4 * GIB))
    message = refusal(LONG, facts)
    assert "--max-model-len " in message
    fits = int(message.split("--max-model-len ")[1].split()[0])
    assert fits % 16 == 0
    assert config(LONG, facts, max_model_len=str(fits)).max_model_len == fits
    assert 0 < config(LONG, facts, max_model_len="auto").max_model_len < fits


def test_tokens_round_up_to_a_page() -> None:
    made = config(kv_cache_tokens="8193")
    assert made.kv_cache_tokens == 8208
    assert made.sources["num_pages"] == "derived: flag --kv-cache-tokens"


def test_memory_by_size_includes_the_null_page() -> None:
    made = config(kv_cache_memory="1GiB")
    assert made.kv_cache_memory <= GIB
    assert made.num_pages == GIB // PAGE_BYTES


def test_more_memory_than_there_is_is_refused_with_both_figures() -> None:
    message = refusal(kv_cache_memory="64GiB")
    assert "64.0 GiB" in message
    assert "flag --kv-cache-memory" in message
    assert "11.2 GiB" in message


def test_weights_that_do_not_fit_are_refused() -> None:
    message = refusal(facts=replace(LAPTOP, available_bytes=GIB // 4))
    assert "0.3 GiB" in message
    assert "0.2 GiB are available" in message


def test_a_pool_without_a_page_is_refused() -> None:
    assert "no page" in refusal(kv_cache_memory="500KiB")


def test_tokens_and_memory_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="not both"):
        config(kv_cache_memory="1GiB", kv_cache_tokens="64k")


@pytest.mark.parametrize(
    ("given", "seqs", "batched"),
    [
        ({}, 256, 2048),
        ({"kv_cache_tokens": "8192"}, 128, 2048),
        ({"kv_cache_tokens": "65536"}, 256, 2048),
        ({"kv_cache_tokens": "512", "max_model_len": "512"}, 16, 2048),
        ({"kv_cache_tokens": "64", "max_model_len": "64"}, 4, 2048),
        ({"kv_cache_tokens": "8192", "max_model_len": "32"}, 256, 2048),
        ({"max_num_batched_tokens": "48"}, 48, 48),
        ({"max_num_seqs": "4096"}, 4096, 4096),
    ],
)
def test_sequences_and_tokens_a_step(given: dict[str, Any], seqs: int, batched: int) -> None:
    made = config(**given)
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (seqs, batched)


def test_a_step_smaller_than_its_sequences_is_refused() -> None:
    message = refusal(max_num_seqs="64", max_num_batched_tokens="32")
    assert "32" in message
    assert "64" in message


def test_a_gpu_gives_its_share_less_the_weights() -> None:
    made = config(facts=WITH_GPU)
    assert (made.device, made.max_num_seqs, made.max_num_batched_tokens) == ("cuda", 1024, 8192)
    assert made.sources["max_num_seqs"] == "derived: the most that suits a cuda"
    large = config(replace(SMALL, vocab_size=2**18), WITH_GPU)
    assert large.max_num_seqs == 256
    assert large.sources["max_num_seqs"] == "derived: rows whose logits take 256 MiB"
    assert made.kv_cache_memory <= 0.92 * 24 * GIB - made.weight_bytes - GIB
    assert made.sources["device"] == "derived: Some GPU"


def test_a_gpu_that_others_use_is_refused_before_anything_loads() -> None:
    facts = replace(WITH_GPU, gpus=(Gpu("Some GPU", 24 * GIB, 9 * GIB),))
    message = refusal(facts=facts, gpu_memory_utilization="0.9")
    assert all(part in message for part in ("21.6", "9.0", "24.0", "--gpu-memory-utilization"))


def test_a_given_pool_needs_only_what_is_free_on_a_gpu() -> None:
    facts = replace(WITH_GPU, gpus=(Gpu("Some GPU", 24 * GIB, 9 * GIB),))
    assert config(facts=facts, kv_cache_memory="4GiB").kv_cache_memory <= 4 * GIB
    message = refusal(facts=facts, kv_cache_memory="8GiB")
    assert "A KV cache of 8.0 GiB (flag --kv-cache-memory) is 0.3 GiB more than" in message


USE = MemoryUse(
    total=24 * GIB, others=GIB, weights=GIB // 4, step=3 * GIB, graphs=GIB, context=GIB // 2
)


def measured(use: MemoryUse = USE, **given: str) -> Config:
    facts = replace(WITH_GPU, gpus=(replace(WITH_GPU.gpus[0], use=use),))
    return resolve_measured(config(facts=WITH_GPU, **given), facts, SMALL)


def test_a_measured_gpu_gives_its_share_less_what_was_measured() -> None:
    made = measured()
    room = int(24 * GIB * 0.92) - USE.own
    assert made.kv_cache_memory == room // int(PAGE_BYTES) * int(PAGE_BYTES)
    before = config(facts=WITH_GPU)
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (
        before.max_num_seqs, before.max_num_batched_tokens,
    )  # fmt: skip
    assert made.sources == before.sources
    assert measured(gpu_memory_utilization="0.5").num_pages < made.num_pages


@pytest.mark.parametrize(
    "given", [{"kv_cache_memory": "2GiB"}, {"kv_cache_tokens": "20000"}, {"swap_space": "1GiB"}]
)
def test_what_was_given_stays_as_it_was(given: dict[str, str]) -> None:
    before, made = config(facts=WITH_GPU, **given), measured(**given)
    assert made.swap_space == before.swap_space
    if "swap_space" not in given:
        assert made == before


def test_an_automatic_length_follows_what_was_measured() -> None:
    tight = replace(USE, step=int(22.02 * GIB) - USE.own + USE.step)  # 60 MiB are left
    made = measured(tight, max_model_len="auto")
    assert 0 < made.max_model_len < 8192
    assert config(facts=WITH_GPU, max_model_len="auto").max_model_len == 8192
    with pytest.raises(StartupError, match=f"use --max-model-len {made.max_model_len} ") as caught:
        measured(tight)
    assert str(caught.value).endswith("or a larger --gpu-memory-utilization.")


def test_no_room_beside_the_worst_step_names_what_is_missing() -> None:
    large = replace(USE, step=30 * GIB)
    with pytest.raises(StartupError) as caught:
        measured(large)
    message = str(caught.value)
    assert all(
        part in message
        for part in ("are missing", "30.0 GiB of a step", "--max-num-batched-tokens (8192)",
                     "other processes use 1.0 GiB", "--gpu-memory-utilization 0.92 allows 22.1 GiB")
    )  # fmt: skip
    with pytest.raises(StartupError, match=r"20\.0 GiB \(flag --kv-cache-memory\) is \d"):
        measured(kv_cache_memory="20GiB")


def test_a_missing_gpu_is_refused() -> None:
    assert "no NVIDIA GPU" in refusal(device="cuda")


@pytest.mark.parametrize(
    ("given", "size", "reason"),
    [
        # 12 GiB, less weights (0.25), libraries (0.5) and a pool of 4 GiB
        ({}, 0.1 * 7.25 * GIB, "10% of the memory left"),
        ({"kv_cache_tokens": "8192"}, 513 * PAGE_BYTES, "as large as the KV cache"),
        ({"swap_space": "2"}, 2 * GIB, "flag --swap-space"),
        ({"swap_space": "512MiB"}, GIB / 2, "flag --swap-space"),
        ({"preemption_mode": "swap"}, 0.1 * 7.25 * GIB, "10% of the memory left"),
        ({"preemption_mode": "recompute"}, 0, "--preemption-mode recompute"),
    ],
)
def test_host_memory_for_preempted_requests(
    given: dict[str, str], size: float, reason: str
) -> None:
    made = config(**given)
    assert made.swap_space == made.num_host_pages * PAGE_BYTES
    assert made.swap_space == pytest.approx(size, rel=2e-3)
    assert reason in made.sources["num_host_pages"]
    assert made.preemption_mode == given.get("preemption_mode", "auto")


def test_a_gpu_swaps_to_a_tenth_of_what_is_free_on_the_host() -> None:
    assert config(facts=WITH_GPU).swap_space == pytest.approx(1.2 * GIB, rel=1e-3)
    large = replace(WITH_GPU, available_bytes=400 * GIB)
    assert config(facts=large).swap_space == pytest.approx(4 * GIB, rel=1e-3)


def test_without_host_memory_there_is_no_choice_of_modes() -> None:
    made = config(swap_space="0")
    assert (made.preemption_mode, made.num_host_pages) == ("recompute", 0)
    assert made.sources["preemption_mode"] == "derived: there is no --swap-space"


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"preemption_mode": "swap", "swap_space": "0"}, "--preemption-mode swap needs"),
        ({"preemption_mode": "recompute", "swap_space": "1"}, "flag --swap-space has no use"),
        ({"swap_space": "400"}, "400.0 GiB is more than the 7.2 GiB"),
        ({"swap_space": "4KiB"}, "no room for a page of 368640 bytes"),
        ({"priority_ageing": "5"}, "flag --priority-ageing needs --scheduling-policy priority"),
        ({"request_timeout": "5", "queue_timeout": "5"}, "--queue-timeout 5 would never act"),
        ({"long_prefill_token_threshold": "2048"}, "at most 2048 tokens"),
        ({"long_prefill_token_threshold": "64", "max_num_batched_tokens": "64"}, "at most 64"),
    ],
)
def test_what_would_have_no_effect_is_refused(given: dict[str, str], part: str) -> None:
    assert part in refusal(**given)


def test_scheduling_options_arrive_as_they_were_given() -> None:
    given = {
        "scheduling_policy": "fair",
        "priority_ageing": "5",
        "long_prefill_token_threshold": "512",
        "target_itl_ms": "50",
        "target_ttft_ms": "2000",
        "request_timeout": "60",
        "queue_timeout": "0.5",
    }
    made = config(**given)
    assert {name: str(getattr(made, name)).removesuffix(".0") for name in given} == given
    plain = config()
    assert (plain.scheduling_policy, plain.priority_ageing) == ("fcfs", 60)
    assert plain.long_prefill_token_threshold == 0
    assert {plain.target_itl_ms, plain.target_ttft_ms} == {None}
    assert {plain.request_timeout, plain.queue_timeout} == {None}


@given(
    available=st.integers(GIB, 64 * GIB),
    length=st.sampled_from(["auto", "64", "4096", "8192"]),
    block=st.sampled_from(["16", "32", "64"]),
    seqs=st.sampled_from(["auto", "1", "32"]),
)
def test_what_starts_can_run_one_request_of_full_length(
    available: int, length: str, block: str, seqs: str
) -> None:
    facts = replace(LAPTOP, available_bytes=available)
    try:
        made = config(facts=facts, max_model_len=length, block_size=block, max_num_seqs=seqs)
    except StartupError:
        assert available < 2 * GIB
        return
    layout = cache_layout(SMALL, made.dtype, made.block_size)
    assert made.num_pages > layout.peak_pages(made.max_model_len, made.max_num_batched_tokens)
    assert 1 <= made.max_num_seqs <= made.max_num_batched_tokens
    assert made.kv_cache_memory + made.weight_bytes < available
    assert made == config(facts=facts, max_model_len=length, block_size=block, max_num_seqs=seqs)


def test_a_config_crosses_a_process_boundary_as_plain_data() -> None:
    made = config(kv_cache_memory="1GiB", hf_overrides='{"a": 1}')
    copy = msgspec.json.decode(msgspec.json.encode(made), type=Config)
    assert copy == made
    assert copy.sources == made.sources


@pytest.mark.parametrize(
    ("given", "queued"),
    [({}, 1024), ({"max_num_seqs": "500"}, 2000), ({"max_num_queued_reqs": "3"}, 3)],
)
def test_requests_that_wait_are_bounded(given: dict[str, str], queued: int) -> None:
    made = config(**given)
    assert made.max_num_queued_reqs == queued
    if len(given) < 1:
        assert "4 × max_num_seqs" in made.sources["max_num_queued_reqs"]


def test_the_summary_names_each_source_and_no_secret() -> None:
    made = config(api_key=["hunter2"], port="9000")
    summary = render_summary(made)
    assert "flag --port" in summary
    assert "derived: the checkpoint's" in summary
    assert "hunter2" not in summary
    assert "shutdown-timeout" not in summary
    assert "shutdown-timeout" in render_summary(made, with_defaults=True)
