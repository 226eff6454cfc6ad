"""Options that people know from other engines and articles, and Octavo does not have.

Each is refused with one sentence that says what to use instead. ``NEUTRAL`` lists values that ask
for nothing, so that a command line from elsewhere still works.
"""

from __future__ import annotations

_LATER = "is not supported yet"
_NEVER = "is not an option of any engine"

EXPLANATIONS: dict[str, str] = {
    # Removed by the engines that had them.
    "use_v2_block_manager": "is gone: there is one block manager",
    "num_scheduler_steps": "is gone: every step is planned on its own",
    "multi_step_stream_outputs": "is gone: every step is planned on its own",
    "guided_decoding_backend": f"is gone, and structured output {_LATER}",
    "disable_log_requests": "is gone: requests are not logged unless --enable-log-requests",
    "num_lookahead_slots": f"is gone, and speculative decoding {_LATER}",
    "max_seq_len_to_capture": "is gone: leave it out",
    "worker_use_ray": f"is gone, and more than one device {_LATER}",
    "engine_use_ray": "is gone: the engine is always a process of its own",
    "disable_frontend_multiprocessing": "is gone: the engine is always a process of its own",
    "device_ids": "is not needed: set CUDA_VISIBLE_DEVICES",
    # Named by articles or by other engines.
    "chunked_prefill_size": "is SGLang's: use --max-num-batched-tokens",
    "mem_fraction_static": "is SGLang's: use --gpu-memory-utilization",
    "context_length": "is SGLang's: use --max-model-len",
    "model_path": "is SGLang's: name the model as the first argument",
    "tp_size": f"is SGLang's, and tensor parallelism {_LATER}",
    "max_running_requests": "is SGLang's: use --max-num-seqs",
    "max_total_tokens": "is SGLang's: use --kv-cache-tokens",
    "disable_radix_cache": "is SGLang's: use --no-enable-prefix-caching",
    "n_gpu_layers": "is llama.cpp's: a model runs on one device, see --device",
    "ctx_size": "is llama.cpp's: use --max-model-len",
    "kv_cache": f"{_NEVER}: use --kv-cache-tokens or --kv-cache-memory",
    "awq_checkpoint": f"{_NEVER}: name the checkpoint as the model; AWQ {_LATER}",
    "use_prefill": f"{_NEVER}: prefill cannot be switched off",
    "use_flash_attn": f"{_NEVER}: see --ops-backend",
    # Decided here.
    "enable_chunked_prefill": "is not needed: long prompts are always computed in chunks",
    "no_enable_chunked_prefill": (
        "is not possible: long prompts are always computed in chunks; raise "
        "--max-num-batched-tokens to make the chunks larger"
    ),
    "trust_remote_code": "is not possible: Octavo never runs code from a model's folder",
    "skip_tokenizer_init": "is not possible: the text routes need the tokenizer",
    "calculate_kv_scales": "is not needed: each token and head has its own scale",
    "num_gpu_blocks_override": "is not an option here: use --kv-cache-tokens",
    "quantization": (
        f"{_LATER}; a GGUF file is dequantised when it is loaded, and needs no option"
    ),
    "tokenizer_mode": "is not needed: fast tokenizers only",
    "disable_custom_all_reduce": f"is not needed: more than one device {_LATER}",
    "task": "is not needed: generation is the only task",
    "runner": "is not needed: generation is the only task",
    "log_file": "is not an option here: redirect the standard error stream",
}

_NOT_YET: dict[str, str] = {
    "Octavo runs a model on one device": (
        "tensor_parallel_size pipeline_parallel_size data_parallel_size enable_expert_parallel "
        "distributed_executor_backend nnodes node_rank master_addr master_port "
        "data_parallel_backend decode_context_parallel_size"
    ),
    "there are no LoRA adapters": "enable_lora lora_modules max_loras max_lora_rank max_cpu_loras",
    "there is no speculative decoding": (
        "speculative_config spec_method spec_model spec_tokens speculative_model "
        "num_speculative_tokens"
    ),
    "ids may differ in the last digits of a sum when the batch does": (
        "batch_invariant enable_deterministic_inference"
    ),
    "there is no tool calling": (
        "enable_auto_tool_choice tool_call_parser tool_parser_plugin tool_strict_level tool_server"
    ),
    "reasoning is not told apart from the answer": "reasoning_parser reasoning_effort_map",
    "there is no structured output": "structured_outputs_config grammar_backend",
    "input is text only": "limit_mm_per_prompt mm_processor_kwargs",
    "weights and KV cache stay on the device, but for preempted requests (--swap-space)": (
        "cpu_offload_gb kv_offloading_size kv_offloading_backend kv_transfer_config "
        "kv_events_config"
    ),
    "nothing is compiled, and graphs are captured unless --enforce-eager": (
        "compilation_config performance_mode cuda_graph_sizes"
    ),
    "put a proxy in front for TLS": "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs",
    "a loaded model stays awake": "enable_sleep_mode",
    "there is no tracing": "otlp_traces_endpoint collect_detailed_traces profiler_config",
    "one process serves HTTP": "api_server_count",
    "Octavo listens on --host and --port": "uds grpc",
    "--scheduling-policy chooses among the schedulers": "scheduler_cls",
    "use --max-num-queued-reqs": "max_num_queued_tokens",
    "--max-num-seqs and --max-num-batched-tokens bound a step": (
        "max_num_active_seqs max_num_partial_prefills "
        "stream_interval watermark prefix_caching_hash_algo"
    ),
    "the server has no such setting": (
        "middleware chat_template_content_format default_chat_template_kwargs response_role "
        "return_tokens_as_token_ids enable_prompt_tokens_details enable_per_request_metrics "
        "enable_force_include_usage enable_server_load_tracking enable_log_outputs max_log_len "
        "disable_access_log_for_endpoints enable_request_id_headers fingerprint_mode"
    ),
    "the engine has no such setting": (
        "logprobs_mode watchdog_config fault_tolerance_config kv_cache_metrics "
        "show_hidden_metrics_for_version aggregate_engine_logging "
        "enable_logging_iteration_details logging_config"
    ),
}

EXPLANATIONS |= {
    name: f"{_LATER}: {fact}" for fact, names in _NOT_YET.items() for name in names.split()
}

# Short and old spellings of the same.
SPELLINGS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "q": "quantization",
    **dict.fromkeys(("O", "O0", "O1", "O2", "O3"), "compilation_config"),
}

# Values that mean what Octavo does anyway.
NEUTRAL: dict[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("1",),
    "pipeline_parallel_size": ("1",),
    "data_parallel_size": ("1",),
    "tokenizer_mode": ("auto",),
    "tp_size": ("1",),
    "api_server_count": ("1",),
    "enable_chunked_prefill": ("true",),
    "trust_remote_code": ("false",),
    "disable_custom_all_reduce": ("true", "false"),
}
