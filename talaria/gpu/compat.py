"""The only module that imports SGLang: which of its parts Talaria relies on, checked when a process of the engine starts.

SGLang's hooks fail open: a target that is gone is logged and the server starts without the hook. So everything the hooks touch is
listed in ``seams`` by name, and ``install`` ends the process with one line where a name or a parameter is not as expected.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

from talaria.gpu import seams
from talaria.gpu.memory.layout import Buffer

TESTED_VERSION: Final = "0.5.23"
SHORTEN: Final = "talaria: shorten"
"""Message of an abort that ``hooks.stop`` takes for its own."""
LOAD_FAILED: Final = "External KV cache load failed"
"""How SGLang ends a request whose prefix a linker could not bring back."""
WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"
"""Kinds of memory that a release gives back."""
_INPUT_MARGIN_TOKENS: Final = 5
"""What SGLang keeps of its longest request for output (``TpModelWorker.get_worker_info``)."""


@dataclass(frozen=True)
class Hook:
    """``before(*a)``, ``after(result, *a)`` or ``around(original, *a)`` of a function of SGLang."""

    target: str
    kind: Literal["before", "after", "around"]
    function: Callable[..., Any]


def install(hooks: Sequence[Hook]) -> None:
    """Registers the hooks, which SGLang applies once all its plugins are loaded.

    Raises SystemExit, which SGLang does not swallow, with one line where this SGLang is not as the hooks expect it.
    """
    problems = [*differences(seams.CALLED, seams.HELD)]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise SystemExit(f"talaria: SGLang {version()} does not fit (tested: {TESTED_VERSION}): {shown}")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def differences(called: dict[str, tuple[str, ...]], held: dict[str, tuple[str, ...]]) -> Iterable[str]:
    """What of SGLang is not as listed, one phrase each."""
    for target, parameters in called.items():
        try:
            found = tuple(inspect.signature(inspect.unwrap(pkgutil.resolve_name(target))).parameters)
        except (ImportError, AttributeError, TypeError, ValueError) as error:  # the latter two: it is no function
            yield f"no {target} ({error})"
            continue
        if found[: len(parameters)] != parameters:
            yield f"{target} takes ({', '.join(found)}), expected ({', '.join(parameters)}, ...)"
    for target, names in held.items():
        try:
            kind = pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            yield f"no {target} ({error})"
            continue
        known = _attributes(kind)
        yield from (f"{target} has no {name}" for name in names if name not in known)


def _attributes(kind: type) -> set[str]:
    """Attributes of a class and, by the code of its methods, of its instances."""
    known = set(dir(kind)).union(*(getattr(base, "__annotations__", {}) for base in kind.__mro__))
    for method in vars(kind).values():
        code = getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)
        known.update(code.co_names if code else ())
    return known


def unapplied(hooks: Iterable[Hook]) -> list[str]:
    """Targets of hooks that SGLang could not apply in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted({hook.target for hook in hooks} - HookRegistry._patched)


def version() -> str:
    import sglang

    return str(sglang.__version__)


def parsers() -> dict[str, list[str]]:
    """Names that ``--tool-call-parser`` and ``--reasoning-parser`` take."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    return {"tool_parser": sorted(FunctionCallParser.ToolCallParserEnum), "reasoning_parser": sorted(ReasoningParser.DetectorMap)}


def is_generation(request: Any) -> bool:
    from sglang.srt.managers.io_struct import GenerateReqInput

    return isinstance(request, GenerateReqInput)


def strict_thinking() -> bool:
    """Whether the server bounds thinking by ``max_thinking_tokens``; otherwise it refuses such requests."""
    from sglang.srt.runtime_context import get_serving

    return bool(get_serving().enable_strict_thinking)


def http_processes() -> int:
    from sglang.srt.runtime_context import get_serving

    return int(get_serving().tokenizer_worker_num)


def http_error(status: int, why: str) -> Exception:
    """What SGLang's endpoints turn into an HTTP error of their own format."""
    from fastapi import HTTPException

    error: Exception = HTTPException(status_code=status, detail=why)
    return error


def finish(manager: Any, rid: str, status: int, why: str) -> None:
    """Ends a request in the HTTP process, whatever the scheduler does, as if the scheduler had refused it."""
    from sglang.srt.managers.io_struct import AbortReq

    known = status in {known.value for known in HTTPStatus}
    reason = {"type": "abort", "status_code": HTTPStatus(status if known else 500), "message": why}
    manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))


def shorten(manager: Any, rid: str) -> None:
    """Asks the scheduler, by an abort that is none, to end a request for its length at its next token."""
    from sglang.srt.managers.io_struct import AbortReq

    manager._dispatch_to_scheduler(AbortReq(rid=rid, abort_message=SHORTEN))


def stop_server(why: str) -> None:
    """Ends the engine, with one line on stderr."""
    import os
    import sys

    from sglang.srt.utils.common import kill_process_tree

    print(f"talaria: {why}", file=sys.stderr, flush=True)
    kill_process_tree(os.getpid())


def prompt_encoder() -> Callable[..., list[int]]:
    """SGLang's encoder of rendered prompts, hooks included."""
    from sglang.srt.entrypoints.openai import parallel_prompt_encode

    return parallel_prompt_encode.parallel_prompt_encode  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Cuts:
    """How a tokenizer can be fed piece by piece: pieces that end with an added token encode independently of each other."""

    backend: Any
    adds_specials: bool
    spans: Callable[[str], list[tuple[int, int]]]
    """Where added tokens are in a text: (start, end), ascending."""


def cuts(tokenizer: Any) -> Cuts | None:
    """None where only the whole text encodes right, or where SGLang does not know the tokenizer well enough to say."""
    from sglang.srt.entrypoints.openai.parallel_prompt_encode import _added_spans, _plan_for

    plan = _plan_for(tokenizer)
    if plan is None:
        return None
    backend, specials, pattern, normalized = plan[:4]
    if backend.truncation is not None or backend.padding is not None or backend.encode_special_tokens:
        return None
    return Cuts(backend, bool(specials), lambda text: _added_spans(text, pattern, normalized))


@dataclass(frozen=True)
class Limits:
    """Of a running engine."""

    page_tokens: int
    kv_tokens: int
    max_running: int
    context_tokens: int
    longest_tokens: int
    """Prompt and output of one request."""

    def most_output_tokens(self, prompt_tokens: int, wanted: int | None) -> int:
        """Where SGLang itself ends a request for its length (``Scheduler.init_req_max_new_tokens``)."""
        paged_prompt = -(-prompt_tokens // self.page_tokens) * self.page_tokens
        most = min(self.longest_tokens - prompt_tokens - 1, self.kv_tokens - paged_prompt - self.page_tokens - 1)
        return max(0, most if wanted is None else min(most, wanted))


async def internal_state(manager: Any) -> dict[str, Any]:
    """What ``/server_info`` shows of the scheduler."""
    states: list[dict[str, Any]] = await manager.get_internal_state()
    return states[0]


def limits(manager: Any, state: dict[str, Any]) -> Limits:
    """Raises KeyError where SGLang does not tell."""
    return Limits(
        page_tokens=state["page_size"],
        kv_tokens=state["memory_usage"]["token_capacity"],
        max_running=state["effective_max_running_requests_per_dp"],
        context_tokens=manager.context_len,
        longest_tokens=manager.max_req_input_len + _INPUT_MARGIN_TOKENS,
    )


_LINKED: Final = {
    "lookup", "load", "start_layer_wise_loading", "finish_layer_wise_loading", "cancel_queued_load", "offload", "num_completed_offloads",
    "pop_completed_offload", "reset", "close",
}  # fmt: skip
"""What SGLang wants of a linker."""


def enlist_linker(kind: type) -> None:
    """Makes a class one of SGLang's linkers, to be loaded by flag. Raises RuntimeError where it wants other methods than expected."""
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

    if UnifiedCacheLinker.__abstractmethods__ != _LINKED:
        raise RuntimeError(f"a linker has other methods: {sorted(UnifiedCacheLinker.__abstractmethods__ ^ _LINKED)}")
    UnifiedCacheLinker.register(kind)


def written_events(linker: Any) -> list[Any]:
    """Events behind everything that may still write or read the device pool: have ``wait`` of streams and ``synchronize``."""
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

    return UnifiedCacheLinker.record_offload_ready(linker)  # type: ignore[no-any-return]


def device_path(cache: Any, node_id: Any, transfers: Sequence[Any]) -> tuple[list[str], Any]:
    """Digests and token slots of a radix node's whole path."""
    digests = [*cache.get_prefix_hash_values(node_id), *transfers[0].keys]
    return digests, cache.tree_core.collect_full_device_indices(node_id, cache.root_node_handle())


@dataclass(frozen=True)
class KvPool:
    """One rank's device KV."""

    by_name: dict[Any, Any]
    """As a linker shows it."""
    buffers: list[Buffer]
    family: str
    dtype: str
    page_tokens: int
    layers: int
    rank: int
    ranks: int
    device: str


def kv_pool(params: Any, components: Any) -> KvPool:
    """Raises ValueError for a pool whose pages are not plain rows of K and V, or of a latent."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    pool = params.token_to_kv_pool_allocator.get_kvcache()
    if set(components) != {ComponentType.FULL}:
        raise ValueError(f"the host keeps pure attention only, this model has {sorted(part.name for part in components)}")
    if isinstance(pool, MHATokenToKVPool) and pool.kv_cache_layout == "nhd":
        family, layers = "mha", [[keys, values] for keys, values in zip(pool.k_buffer, pool.v_buffer, strict=True)]
    elif isinstance(pool, MLATokenToKVPool):
        family, layers = "mla", [[latent] for latent in pool.kv_buffer]
    else:
        raise ValueError(f"the host does not know KV pools like {type(pool).__name__}")
    buffers = [Buffer(layer, rows.data_ptr(), _row_bytes(rows) * params.page_size) for layer, parts in enumerate(layers) for rows in parts]
    group, distributed = params.tp_cache_group, torch.distributed
    several = distributed.is_initialized() and group is not None
    return KvPool(
        by_name={PoolName.KV: pool}, buffers=buffers, family=family, dtype=f"{pool.dtype}/{pool.store_dtype}", page_tokens=params.page_size,
        layers=len(layers), rank=distributed.get_rank(group=group) if several else 0,
        ranks=distributed.get_world_size(group=group) if several else 1, device=str(pool.device).partition(":")[0],
    )  # fmt: skip


def _row_bytes(rows: Any) -> int:
    """Of one token. Raises ValueError where tokens do not follow each other."""
    nbytes = rows.stride(0) * rows.element_size()
    if not rows[0].is_contiguous() or nbytes != rows[0].numel() * rows.element_size():
        raise ValueError("the rows of the KV pool do not follow each other")
    return int(nbytes)


def paged_allocator() -> type:
    """SGLang's allocator of KV pages, to derive from."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    return PagedTokenToKVPoolAllocator  # type: ignore[no-any-return]


def new_pages(page_tokens: int, seq_lens: Any, prefix_lens: Any = None) -> int:
    """Pages that an extension from ``prefix_lens`` to ``seq_lens`` takes; without ``prefix_lens``, a decode step."""
    from sglang.srt.utils import get_num_new_pages

    decode = prefix_lens is None
    return int(get_num_new_pages(seq_lens=seq_lens, page_size=page_tokens, prefix_lens=prefix_lens, decode=decode))


def platform(device: Literal["cpu", "cuda"]) -> Any:
    """The class of SGLang's own platform for a device."""
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.cuda import CudaSRTPlatform

    return CpuSRTPlatform if device == "cpu" else CudaSRTPlatform


def kv_pool_class(family: Literal["mha", "mla"]) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    return MHATokenToKVPool if family == "mha" else MLATokenToKVPool


def no_memory_saver() -> Any:
    """In the place of SGLang's memory saver: what is made within is ordinary memory."""
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    return TorchMemorySaverAdapter.create(enable=False)


def tp_rank() -> tuple[int, int]:
    """Of this process, and how many there are."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.tp_rank), int(parallel.tp_size)
