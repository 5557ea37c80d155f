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
import logging
import os
import re
from array import array
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from talaria.gpu import compat
from talaria.gpu.hooks import offload, resume, telemetry, tokenise
from talaria.gpu.hooks.link import Link
from talaria.gpu.protocol import engine

_CALL_ID: Final = re.compile(r"talaria-[0-9a-f]{16}")
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
_ERRORS_IN_STREAM: Final = ("/v1/messages", "/v1/responses")
"""Endpoints that answer a streaming request with 200 at once: a later error is an event of their stream."""
_log = logging.getLogger(__name__)


class Call:
    """One held call, from its arrival to its last ``Ended``."""

    def __init__(self, holder: Holder, manager: Any, state: Any, request: Any, limit_tokens: int) -> None:
        self.id: str = request.rid
        self.dropped: engine.Drop | None = None
        self.ended = False
        self._holder = holder
        self._manager = manager
        self._state = state
        self._request = request
        self._limit_tokens = limit_tokens
        self._output: array[int] = array("q")
        self._granted_tokens = 0
        self._segment_start = 0
        self._running = False
        self._text_chars = 0
        """Of the call, passed on to the client's stream."""
        self._seen_chars = 0
        """Of the call, received in this segment: each segment's text begins anew."""
        self._cached: tuple[int, Any] | None = None
        """What SGLang reports of the prefix cache for the call: that of its first segment."""

    def grant(self, steps: int) -> None:
        """Starts the next segment; the prefill gives the first token of a call, and one of the steps later on."""
        if self._running or self.ended:
            _log.error("talaria: a grant for %s, which is not held", self.id)
            return
        self._running = True
        done = len(self._output)
        self._segment_start = done
        self._granted_tokens = min(self._limit_tokens, done + max(1, steps if done else 1 + steps))
        self._seen_chars = 0
        self._holder.spawn(self._run())

    async def _run(self) -> None:
        async with self._manager.is_pause_cond:
            await self._manager.is_pause_cond.wait_for(lambda: not self._manager.is_pause)
        if self.ended:
            return
        try:
            await self._manager._send_one_request(self._segment())
        except Exception as error:
            _log.exception("talaria: a segment of %s could not be sent", self.id)
            self.drop(500, f"the engine could not run it: {type(error).__name__}")

    def _segment(self) -> Any:
        """The request that the scheduler gets: all there is so far, and limits for the whole."""
        segment, parameters = copy.copy(self._request), copy.copy(self._request.sampling_params)
        custom = {key: value for key, value in (parameters.custom_params or {}).items() if key != resume.OUTPUT_TOKENS}
        segment.sampling_params = parameters
        segment.stream = True
        parameters.max_new_tokens = self._granted_tokens
        if self._output:
            segment.input_ids = self._request.input_ids + self._output
            segment.logprob_start_len = -1
            custom[resume.OUTPUT_TOKENS] = len(self._output)
        parameters.custom_params = custom or None
        return segment

    def edit(self, batch: Any, index: int) -> None:
        """Takes note of the scheduler's output for this call and makes it part of one unbroken generation."""
        self._output.extend(batch.output_ids[index])
        done, finish = len(self._output), batch.finished_reasons[index]
        more = finish is not None and finish["type"] == "length" and self._granted_tokens <= done < self._limit_tokens
        self._holder.send(engine.Progress(self.id, done))
        if finish is not None:
            self._running = False
            self._tell_end(finish, more, _device_tokens(batch, index))
        if more:
            batch.finished_reasons[index] = None
            if batch.weight_versions is not None:
                batch.weight_versions[index] = None
            self._state.dispatched = False
        batch.output_strs[index] = self._text(batch.output_strs[index], more)
        self._report_first_cached(batch, index)

    def _tell_end(self, finish: dict[str, Any], more: bool, cached_tokens: int) -> None:
        if more:
            reason, why = "grant", ""
        elif finish["type"] == "abort":
            reason, why = "failed", str(finish.get("message") or "the engine ended it")
        else:
            reason, why = "finished", ""
        self._send_end(reason, why, cached_tokens)

    def _send_end(self, reason: str, why: str, cached_tokens: int) -> None:
        tokens = array("I", self._output[self._segment_start :]).tobytes()
        self._holder.send(engine.Ended(self.id, reason, len(self._output), tokens, cached_tokens, why))
        if reason != "grant":
            self.ended = True
            self._holder.forget(self)

    def _text(self, delta: str, more: bool) -> str:
        """What of the engine's text the client may have now and has not yet.

        The engine tells the text of each segment from the start of the output on. At the end of a segment it tells all; what may
        still change, a broken character or the beginning of a stop string, is kept back as in the middle of a generation.
        """
        fresh = delta[max(0, self._text_chars - self._seen_chars) :]
        self._seen_chars += len(delta)
        if more:
            fresh = _settled(fresh, self._request.sampling_params.stop_strs)
        self._text_chars += len(fresh)
        return fresh

    def _report_first_cached(self, batch: Any, index: int) -> None:
        details = batch.cached_tokens_details
        if self._cached is None:
            self._cached = batch.cached_tokens[index], details[index] if details else None
        batch.cached_tokens[index] = self._cached[0]
        if details:
            details[index] = self._cached[1]

    def drop(self, status: int, why: str, reason: str = "failed") -> None:
        """Ends the call for its client at once; the engine stops working on it when it can."""
        if self.ended:
            return
        if self._running:
            self._manager.abort_request(self.id)
        self.dropped = engine.Drop(self.id, status, why)
        self.end(reason, why)
        compat.finish(self._manager, self.id, status, why)

    async def watch(self, request: Any) -> None:
        """Ends the call when its client goes away, which nothing else looks for until an answer has begun."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.drop(499, "the client has left", "aborted")

    def end(self, reason: str, why: str) -> None:
        """The last word, unless it was said already."""
        if not self.ended:
            self._send_end(reason, why, 0)


def _device_tokens(batch: Any, index: int) -> int:
    details = batch.cached_tokens_details[index] if batch.cached_tokens_details else None
    return int(details["device"] if details else batch.cached_tokens[index])


def _settled(text: str, stops: list[str]) -> str:
    """``text`` without an unfinished character and without what may be the beginning of a stop string at its end."""
    text = text.rstrip(_UNFINISHED)
    unsure = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
    return text[: len(text) - unsure]


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
        except Exception as error:
            compat.stop_server(f"the plugin does not work in this server: {error!r}")
            return
        await self._link.run()

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

    def spawn(self, work: Any) -> None:
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
            async for out in _answer(manager, held, state, request, call):
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
    compat.Hook(compat.GENERATE, "around", _generate),
    compat.Hook(compat.START, "after", _start),
    compat.Hook(compat.BATCH_OUTPUT, "before", _edit),
    compat.Hook(compat.RESPONSES, "around", _respond),
)
