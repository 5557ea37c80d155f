"""What of SGLang Talaria relies on, by name: functions that are hooked or called, and what is read and written (``compat`` checks them)."""

from __future__ import annotations

from typing import Final

_MANAGERS = "sglang.srt.managers."
_MANAGER = _MANAGERS + "tokenizer_manager.TokenizerManager."
_SCHEDULER = _MANAGERS + "scheduler.Scheduler."
_GRAMMARS = "sglang.srt.constrained.grammar_manager.GrammarManager."

GENERATE = _MANAGER + "generate_request"
START = _MANAGER + "auto_create_handle_loop"
BATCH_OUTPUT = _MANAGER + "_handle_batch_output"
_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses."
_MESSAGES = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing."
RESPONSES = _RESPONSES + "create_responses"
RESPONSE_PROMPT = _RESPONSES + "_make_request"
MESSAGE = _MESSAGES + "_handle_non_streaming"
MESSAGE_STREAM = _MESSAGES + "_handle_streaming"
MESSAGE_COUNT = _MESSAGES + "handle_count_tokens"
ENCODE = "sglang.srt.entrypoints.openai.parallel_prompt_encode.parallel_prompt_encode"
CREATE = _SCHEDULER + "_create_generation_req"
ABORT = _SCHEDULER + "abort_request"
PAUSED = _SCHEDULER + "_record_scheduler_state_for_paused_engine"
PAUSE = _SCHEDULER + "pause_generation"
CONTINUE = _SCHEDULER + "continue_generation"
_UPDATER = _MANAGERS + "scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
RELEASE = _UPDATER + "release_memory_occupation"
RESUME = _UPDATER + "resume_memory_occupation"
KV_ROOM = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"
GRAMMAR = _GRAMMARS + "process_req_with_grammar"
GRAMMARS_READY = _GRAMMARS + "get_ready_grammar_requests"
_PENALTIES = "sglang.srt.sampling.penaltylib."
_ORCHESTRATOR = _PENALTIES + "orchestrator.BatchedPenalizerOrchestrator"
PENALTIES = _ORCHESTRATOR + ".__init__"
_LINKERS = "sglang.srt.mem_cache.unified_cache.unified_cache_linker."
_LINKER = _LINKERS + "UnifiedCacheLinker"
_WRAPPER = _LINKERS + "UnifiedCacheLinkerWrapper"
OFFLOAD_NODE = _WRAPPER + "._offload_node"
START_LOADS = _WRAPPER + ".start_layer_wise_loading"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_KV_POOLS = "sglang.srt.mem_cache.memory_pool."
_ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter"
REQUEST_TABLE = _KV_POOLS + "ReqToTokenPool.__init__"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."
MEMORY_SAVER = _RUNNER + "init_memory_saver_adapter"
ATTENTION = _RUNNER + "init_attention_backends"
_ALLOCATOR = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
SCHEDULER_MADE = _SCHEDULER + "__init__"
INTERNAL_STATE = _MANAGERS + "scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state"

CALLED: Final[dict[str, tuple[str, ...]]] = {
    GENERATE: ("self", "obj", "request"),
    START: ("self",),
    BATCH_OUTPUT: ("self", "recv_obj"),
    RESPONSES: ("self", "request", "raw_request"),
    RESPONSE_PROMPT: ("self", "request", "prev_response", "tokenizer"),
    MESSAGE: ("self", "chat_request", "anthropic_request", "raw_request"),
    MESSAGE_STREAM: ("self", "chat_request", "anthropic_request", "raw_request"),
    MESSAGE_COUNT: ("self", "request", "raw_request"),
    "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._convert_to_internal_request": ("self", "request", "raw_request"),
    ENCODE: ("tokenizer", "text", "encode_kwargs"),
    CREATE: ("self", "recv_req"),
    ABORT: ("self", "recv_req"),
    _SCHEDULER + "collect_inflight_reqs": ("self",),
    PAUSED: ("self",),
    PAUSE: ("self", "recv_req"),
    CONTINUE: ("self", "recv_req"),
    RELEASE: ("self", "recv_req"),
    RESUME: ("self", "recv_req"),
    KV_ROOM: ("self", "pre_model_load_memory"),
    REQUEST_TABLE: ("self", "size", "max_context_len", "device", "enable_memory_saver"),
    MEMORY_SAVER: ("self",),
    ATTENTION: ("self",),
    GRAMMAR: ("self", "req"),
    GRAMMARS_READY: ("self",),
    PENALTIES: ("self", "vocab_size", "batch", "penalizers"),
    INTERNAL_STATE: ("self", "recv_req"),
    OFFLOAD_NODE: ("self", "node_id", "transfers"),
    SCHEDULER_MADE: ("self", "server_args", "port_args"),
    _ALLOCATOR + ".clear": ("self",),
    _ALLOCATOR + ".available_size": ("self",),
    _ALLOCATOR + ".get_all_free_pages": ("self",),
    _ALLOCATOR + ".alloc": ("self", "need_size"),
    _ALLOCATOR + ".alloc_extend": (
        "self", "prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu", "last_loc", "extend_num_tokens", "num_new_pages",
    ),
    _ALLOCATOR + ".alloc_decode": ("self", "seq_lens", "seq_lens_cpu", "last_loc"),
    _ALLOCATOR + "._release_page_ids": ("self", "page_ids"),
    "sglang.srt.utils.common.get_num_new_pages": ("seq_lens", "page_size", "prefix_lens", "decode"),
    START_LOADS: ("self",),
    _LINKER + ".record_offload_ready": ("self",),
    _CACHE + ".get_prefix_hash_values": ("self", "node_id"),
    _CACHE + ".root_node_handle": ("self", "extra_key"),
    "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface.collect_full_device_indices": (
        "self", "from_node_id", "until_node_id",
    ),
    _MANAGER + "_set_default_priority": ("self", "obj"),
    _MANAGER + "_init_req_state": ("self", "obj", "request"),
    _MANAGER + "_release_req_states_on_failure": ("self", "request_states"),
    _MANAGER + "_tokenize_one_request": ("self", "obj"),
    _MANAGER + "_send_one_request": ("self", "tokenized_obj"),
    _MANAGER + "_stream_one_response": ("self", "obj", "state", "request"),
    _MANAGER + "_handle_abort_req": ("self", "recv_obj"),
    _MANAGER + "abort_request": ("self", "rid"),
    _MANAGER + "_dispatch_to_scheduler": ("self", "obj"),
    _MANAGER + "get_internal_state": ("self",),
    _MANAGERS + "io_struct.GenerateReqInput.normalize_batch_and_arguments": ("self",),
    _MANAGERS + "io_struct.GenerateReqInput.contains_mm_input": ("self",),
    _MANAGERS + "scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_update_reasoning_tokens": (
        "self", "req", "next_token_id",
    ),
    _RESPONSES + "create_error_response": ("self", "message", "err_type", "status_code"),
    "sglang.srt.entrypoints.openai.parallel_prompt_encode._plan_for": ("tokenizer",),
    "sglang.srt.entrypoints.openai.parallel_prompt_encode._added_spans": ("text", "pattern", "npattern"),
    "sglang.srt.runtime_context.get_serving": (),
    "sglang.srt.runtime_context.get_parallel": (),
    "sglang.srt.utils.common.kill_process_tree": ("parent_pid",),
}  # fmt: skip
"""Functions that are hooked or called, with their first parameters."""

HELD: Final[dict[str, tuple[str, ...]]] = {
    _MANAGERS + "tokenizer_manager.TokenizerManager": (
        "tokenizer", "rid_to_state", "is_pause_cond", "is_pause", "max_req_input_len", "context_len",
    ),
    _MANAGERS + "tokenizer_manager.ReqState": ("dispatched", "prompt_token_ids"),
    _MANAGERS + "io_struct.GenerateReqInput": (
        "rid", "is_single", "text", "input_ids", "input_embeds", "lora_path", "session_params", "max_thinking_tokens",
        "return_prompt_token_ids", "stream",
    ),
    _MANAGERS + "io_struct.TokenizedGenerateReqInput": ("input_ids", "sampling_params", "stream", "logprob_start_len"),
    _MANAGERS + "io_struct.BatchStrOutput": (
        "rids", "finished_reasons", "output_strs", "output_ids", "cached_tokens", "cached_tokens_details", "weight_versions",
    ),
    _MANAGERS + "io_struct.AbortReq": ("rid", "finished_reason", "abort_message"),
    _MANAGERS + "io_struct.GetInternalStateReqOutput": ("internal_state",),
    "sglang.srt.sampling.sampling_params.SamplingParams": (
        "max_new_tokens", "min_new_tokens", "custom_params", "stop_strs", "beam_width",
    ),
    _MANAGERS + "schedule_batch.Req": (
        "origin_input_ids", "origin_input_ids_unpadded", "output_ids", "full_untruncated_fill_ids", "send_token_offset",
        "send_output_token_logprobs_offset", "return_logprob", "logprob", "grammar",
    ),
    _MANAGERS + "schedule_batch.ReqLogprob": (
        "top_logprobs_num", "token_ids_logprob", "output_token_logprobs_val", "output_token_logprobs_idx", "output_top_logprobs_val",
        "output_top_logprobs_idx", "output_token_ids_logprobs_val", "output_token_ids_logprobs_idx", "input_token_logprobs_val",
        "input_token_logprobs_idx", "input_top_logprobs_val", "input_top_logprobs_idx", "input_token_ids_logprobs_val",
        "input_token_ids_logprobs_idx",
    ),
    _MANAGERS + "schedule_batch.ScheduleBatch": ("enable_overlap", "reqs"),
    _ORCHESTRATOR: ("batch", "device", "penalizers"),
    _PENALTIES + "frequency_penalty.BatchedFrequencyPenalizer": ("frequency_penalties", "cumulated_frequency_penalties"),
    _PENALTIES + "presence_penalty.BatchedPresencePenalizer": ("presence_penalties", "cumulated_presence_penalties"),
    _PENALTIES + "repetition_penalty.BatchedRepetitionPenalizer": ("repetition_penalties", "cumulated_repetition_penalties"),
    _PENALTIES + "min_new_tokens.BatchedMinNewTokensPenalizer": ("len_output_tokens", "is_prepared", "orchestrator"),
    _MANAGERS + "scheduler.Scheduler": ("batch_result_processor", "waiting_queue", "grammar_manager", "chunked_req"),
    _GRAMMARS.rstrip("."): ("grammar_queue",),
    _MESSAGES.rstrip("."): ("openai_serving_chat",),
    _WRAPPER: ("cache", "cache_linker", "hit_markers"),
    _CACHE: ("tree_core",),
    _ALLOCATOR: ("num_pages", "page_size", "device", "free_pages", "staged_pages", "free_group", "free_page_ids_group"),
    _KV_POOLS + "MHATokenToKVPool": (
        "k_buffer", "v_buffer", "kv_cache_layout", "store_dtype", "dtype", "size", "page_size", "layer_num", "_kv_buffer_shapes",
        "_create_buffers_normal",
    ),
    _KV_POOLS + "MLATokenToKVPool": (
        "kv_buffer", "store_dtype", "dtype", "size", "page_size", "layer_num", "kv_cache_dim", "_create_buffers",
    ),
    _RUNNER.rstrip("."): ("memory_saver_adapter",),
    _ADAPTER: ("create",),
    "sglang.srt.platforms.interface.SRTPlatform": ("post_load_model", "get_kv_pool_cls", "get_paged_allocator_cls"),
    "sglang.srt.mem_cache.cache_init_params.CacheInitParams": ("token_to_kv_pool_allocator", "page_size", "tp_cache_group"),
    "sglang.srt.mem_cache.hicache_storage.PoolTransfer": ("keys", "device_indices"),
}  # fmt: skip
"""Classes and the attributes of theirs that are read or written."""
