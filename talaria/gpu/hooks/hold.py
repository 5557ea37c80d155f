"""Calls that run when the agent says so: SGLang renders, validates and tokenises a request, then it is held and run in segments.

A request with ``CALL_HEADER`` goes SGLang's own way up to where it would be sent to the scheduler, and from where the scheduler's
output comes back. In between the agent decides: each ``Grant`` sends one segment, prompt and output so far, whose limits are those
of the whole call (``resume`` makes it exact). The scheduler's output is edited before SGLang sees it, so that a segment that ends
with its grant looks like any other chunk: text, logprobs, parsers, stream formats and statistics are SGLang's own and know of one
request only.
"""

from __future__ import annotations

import asyncio
import copy
import os
import re
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final

from talaria.gpu import compat, seams
from talaria.gpu.hooks import offload, telemetry, tokenise
from talaria.gpu.hooks.call import Call
from talaria.gpu.hooks.link import Link
from talaria.gpu.protocol import engine

_CALL_ID: Final = re.compile(r"talaria-[0-9a-f]{16}")
_ERRORS_IN_STREAM: Final = ("/v1/messages", "/v1/responses")
"""Endpoints that answer a streaming request with 200 at once: a later error is an event of their stream."""


class Holder:
    """The calls of this process and the link to the agent."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._link: Link | None = None
        self._limits: compat.Limits | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False

    def start(self, manager: Any) -> None:
        """Connects to the agent, once the server's event loop runs."""
        if not self._started:
            self._started = True
            self.spawn(self._connect(manager))

    async def _connect(self, manager: Any) -> None:
        try:
            self._link = Link(os.environ[engine.SOCKET_VARIABLE], await self._hello(manager), self._received, self._lost)
            await self._link.run()
        except Exception as error:  # a server that nobody can reach any more had better start anew
            compat.stop_server(f"the plugin does not work in this server: {error!r}")

    async def _hello(self, manager: Any) -> engine.Hello:
        """Raises RuntimeError or KeyError where the hooks are not at work in all processes of the server."""
        state = await compat.internal_state(manager)
        missing = compat.unapplied([*HOOKS, *offload.HOOKS, *tokenise.HOOKS])
        if missing or state.get(telemetry.ABI_KEY) != engine.ABI:
            raise RuntimeError(f"hooks are missing in the HTTP process ({missing}) or in the scheduler")
        if compat.http_processes() != 1 or manager.tokenizer is None:
            raise RuntimeError("it needs one HTTP process that has a tokenizer")
        limits = self._limits = compat.limits(manager, state)
        return engine.Hello(
            abi=engine.ABI, model=os.environ.get(engine.MODEL_VARIABLE, ""), pid=os.getpid(), page_tokens=limits.page_tokens,
            kv_tokens=limits.kv_tokens, max_running=limits.max_running, context_tokens=limits.context_tokens,
        )  # fmt: skip

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def send(self, message: engine.FromEngine) -> None:
        if self._link is not None:
            self._link.send(message)

    def forget(self, call: Call) -> None:
        self._calls.pop(call.id, None)

    def _received(self, message: engine.ToEngine) -> None:
        call = self._calls.get(message.call)
        if call is None:
            return
        if isinstance(message, engine.Grant):
            call.grant(message.steps)
        elif isinstance(message, engine.Stop):
            call.stop()
        else:
            call.drop(message.status, message.why)

    def _lost(self) -> None:
        for call in list(self._calls.values()):
            call.drop(503, "the engine has lost its instance agent")

    def edit(self, batch: Any) -> None:
        """Before SGLang takes in a batch of the scheduler's output."""
        if self._calls:
            for index, rid in enumerate(batch.rids):
                call = self._calls.get(rid)
                if call is not None:
                    call.edit(batch, index)

    async def hold(self, manager: Any, obj: Any, request: Any, call_id: str) -> AsyncGenerator[Any, None]:
        """``TokenizerManager.generate_request`` for a held call. Raises ValueError, which is a 400, where it cannot be held."""
        manager.auto_create_handle_loop()
        obj.normalize_batch_and_arguments()
        _refuse(obj, request, call_id)
        manager._set_default_priority(obj)
        held = copy.copy(obj)
        held.rid = call_id
        await _tokenise(manager, held)
        manager._init_req_state(held, request)
        state = manager.rid_to_state[call_id]
        try:
            call = request.state.talaria_call = await self._admit(manager, held, state)
            async with aclosing(_answer(manager, held, state, request, call)) as answer:
                async for out in answer:
                    out["meta_info"]["id"] = obj.rid
                    yield out
        except BaseException:
            manager._release_req_states_on_failure({call_id: state})
            raise

    async def _admit(self, manager: Any, held: Any, state: Any) -> Call:
        """Validates the request as SGLang does and tells the agent of it."""
        tokenized = await manager._tokenize_one_request(held)
        prompt, most = tokenized.input_ids, manager.max_req_input_len
        if len(prompt) >= most:
            raise ValueError(f"The input ({len(prompt)} tokens) is longer than the model's KV cache allows ({most} tokens).")
        vocabulary = manager.model_config.vocab_size
        if not held.text and not (min(prompt, default=0) >= 0 and max(prompt, default=0) < vocabulary):
            raise ValueError(f"token ids of a prompt are 0 to {vocabulary - 1}")  # SGLang would look others up, and die of it
        if held.return_prompt_token_ids:
            state.prompt_token_ids = list(prompt)
        wanted = tokenized.sampling_params.max_new_tokens
        limit_tokens = self._limits.most_output_tokens(len(prompt), wanted) if self._limits else 0
        call = Call(self, manager, state, tokenized, limit_tokens)
        self._calls[call.id] = call
        if self._link is not None and self._link.connected:
            self.send(engine.Held(call.id, array("I", prompt).tobytes(), limit_tokens))
        else:
            call.drop(503, "the engine has no instance agent")
        return call


async def _answer(manager: Any, held: Any, state: Any, request: Any, call: Call) -> AsyncGenerator[Any, None]:
    """The call's output as SGLang makes it of the edited batches. Raises an HTTP error where the call is dropped before there was any."""
    at_once = held.stream and request.url.path in _ERRORS_IN_STREAM
    watch = None if at_once else asyncio.create_task(call.watch(request))
    begun = at_once
    try:
        async for out in manager._stream_one_response(obj=held, state=state, request=request):
            if call.dropped and held.stream and not begun:
                raise compat.http_error(call.dropped.status, call.dropped.why)
            begun = True
            if watch is not None and held.stream:
                watch.cancel()  # from here on the endpoint looks itself
            yield out
        call.end("failed", "the engine ended it")
    finally:
        call.end("aborted", "")
        if watch is not None:
            watch.cancel()


def _refuse(obj: Any, request: Any, call_id: str) -> None:
    """Raises ValueError for what cannot be held: a call is one sequence of text, run once."""
    if not _CALL_ID.fullmatch(call_id):
        raise ValueError(f"{engine.CALL_HEADER}: expected talaria- and 16 hexadecimal digits")
    if hasattr(request.state, "talaria_call"):
        raise ValueError("tools that the server runs itself are not available here")
    if not compat.is_generation(obj):
        raise ValueError("only text generation is available here")
    if not obj.is_single:
        raise ValueError("one prompt and one completion (n = 1) a request, please: batches are not available here")
    if obj.contains_mm_input() or obj.input_embeds is not None:
        raise ValueError("this model is served for text only")
    for name in ("lora_path", "session_params"):
        if getattr(obj, name):
            raise ValueError(f"{name} is not available here")
    if (obj.sampling_params or {}).get("beam_width"):
        raise ValueError("beam search is not available here")
    if obj.max_thinking_tokens is not None and not compat.strict_thinking():
        raise ValueError("max_thinking_tokens needs a server that is started with --enable-strict-thinking")


async def _tokenise(manager: Any, held: Any) -> None:
    """Encodes a plain text prompt off the event loop, as chat prompts are."""
    if isinstance(held.text, str) and held.text and held.input_ids is None and manager.tokenizer is not None:
        encode = compat.prompt_encoder()
        held.input_ids = await asyncio.get_running_loop().run_in_executor(None, encode, manager.tokenizer, held.text)


_holder = Holder()


def _call_id(request: Any) -> str | None:
    """None: a request that is not to be held."""
    headers = getattr(request, "headers", None)
    return None if headers is None else headers.get(engine.CALL_HEADER)


def _generate(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> Any:
    call_id = _call_id(request)
    return original(manager, obj, request) if call_id is None else _holder.hold(manager, obj, request, call_id)


def _start(_result: None, manager: Any) -> None:
    _holder.start(manager)


def _edit(_manager: Any, recv_obj: Any) -> None:
    _holder.edit(recv_obj)


async def _respond(original: Callable[..., Any], endpoint: Any, request: Any, raw_request: Any = None) -> Any:
    """``/v1/responses`` makes a 400 of every error; a dropped call has its own status. Nobody could hold a call in the background."""
    if request.background and _call_id(raw_request) is not None:
        return endpoint.create_error_response("background responses are not available here")
    answer = await original(endpoint, request, raw_request)
    call = getattr(raw_request.state, "talaria_call", None) if raw_request is not None else None
    if call is None or call.dropped is None or request.stream:
        return answer
    return endpoint.create_error_response(call.dropped.why, err_type="server_error", status_code=call.dropped.status)


HOOKS: Final = (
    compat.Hook(seams.GENERATE, "around", _generate),
    compat.Hook(seams.START, "after", _start),
    compat.Hook(seams.BATCH_OUTPUT, "before", _edit),
    compat.Hook(seams.RESPONSES, "around", _respond),
)
