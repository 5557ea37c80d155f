"""One held call: its segments, and the scheduler's output of them made into one unbroken generation."""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from talaria.gpu import compat
from talaria.gpu.hooks import resume
from talaria.gpu.protocol import engine

_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
_log = logging.getLogger(__name__)


class Host(Protocol):
    """What a call needs of where it lives."""

    def send(self, message: engine.FromEngine) -> None: ...

    def forget(self, call: Call) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...


class Call:
    """From a request's arrival to its last ``Ended``.

    ``manager`` and ``state`` are SGLang's tokenizer manager and its record of the request, ``request`` what it would send to the scheduler.
    """

    def __init__(self, host: Host, manager: Any, state: Any, request: Any, limit_tokens: int) -> None:
        self.id: str = request.rid
        self.dropped: engine.Drop | None = None
        self.ended = False
        self._host = host
        self._manager = manager
        self._state = state
        self._request = request
        self._limit_tokens = limit_tokens
        self._output: array[int] = array("q")
        self._granted_tokens = 0
        self._segment_start = 0
        self._running = self._sent = self._stopping = False
        """A segment runs; the scheduler has it; it is to end before its grant."""
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
        self._running, self._sent, self._stopping = True, False, False
        done = len(self._output)
        self._segment_start = done
        self._granted_tokens = min(self._limit_tokens, done + max(1, steps if done else 1 + steps))
        self._seen_chars = 0
        self._host.spawn(self._run())

    async def _run(self) -> None:
        async with self._manager.is_pause_cond:
            await self._manager.is_pause_cond.wait_for(lambda: not self._manager.is_pause)
        if self.ended:
            return
        try:
            await self._manager._send_one_request(self._segment())
            self._sent = True
            if self._stopping:
                compat.shorten(self._manager, self.id)
        except Exception as error:
            _log.exception("talaria: a segment of %s could not be sent", self.id)
            self.drop(500, f"the engine could not run it: {type(error).__name__}")

    def stop(self) -> None:
        """Ends the running segment at its next token. That is the scheduler's to do: it alone knows which token is the next."""
        if self._running and not self._stopping and not self.ended:
            self._stopping = True
            if self._sent:
                compat.shorten(self._manager, self.id)

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
        if self._lacks_prefix(batch.finished_reasons[index]):
            self._run_again(batch, index)
            return
        self._output.extend(batch.output_ids[index])
        done, finish = len(self._output), batch.finished_reasons[index]
        again = "" if finish is None else self._held_again(finish, done)
        self._host.send(engine.Progress(self.id, done))
        if finish is not None:
            self._running = False
            self._tell_end(finish, again, *_cached_tokens(batch, index))
        if again:
            self._hide_end(batch, index)
        batch.output_strs[index] = self._text(batch.output_strs[index], more=bool(again))
        self._report_first_cached(batch, index)

    def _hide_end(self, batch: Any, index: int) -> None:
        """The segment's end is not the call's."""
        batch.finished_reasons[index] = None
        if batch.weight_versions is not None:
            batch.weight_versions[index] = None
        self._state.dispatched = False

    def _lacks_prefix(self, finish: dict[str, Any] | None) -> bool:
        """The segment was ended because its prefix did not come back from the host: nothing of it was computed."""
        return finish is not None and finish["type"] == "abort" and finish.get("message") == compat.LOAD_FAILED

    def _run_again(self, batch: Any, index: int) -> None:
        """The same segment, which recomputes its prefix: until the next flush the linker finds nothing for the call any more."""
        self._hide_end(batch, index)
        batch.output_ids[index], batch.output_strs[index] = [], ""
        self._sent, self._seen_chars = False, 0
        self._host.spawn(self._run())

    def _held_again(self, finish: dict[str, Any], done: int) -> str:
        """By which of ``HELD_AGAIN`` the segment has ended; empty: the call has."""
        if finish["type"] != "length" or done >= self._limit_tokens:
            return ""
        if done >= self._granted_tokens:
            return "grant"
        return "stopped" if self._stopping else ""

    def _tell_end(self, finish: dict[str, Any], again: str, device_tokens: int, host_tokens: int) -> None:
        if again:
            reason, why = again, ""
        elif finish["type"] == "abort":
            reason, why = "failed", str(finish.get("message") or "the engine ended it")
        else:
            reason, why = "finished", ""
        self._send_end(reason, why, device_tokens, host_tokens)

    def _send_end(self, reason: str, why: str, device_tokens: int = 0, host_tokens: int = 0) -> None:
        tokens = array("I", self._output[self._segment_start :]).tobytes()
        self._host.send(engine.Ended(self.id, reason, len(self._output), tokens, device_tokens, why, host_tokens))
        if reason not in engine.HELD_AGAIN:
            self.ended = True
            self._host.forget(self)

    def _text(self, delta: str, *, more: bool) -> str:
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
            self._send_end(reason, why)


def _cached_tokens(batch: Any, index: int) -> tuple[int, int]:
    """On the device, and on the host."""
    details = batch.cached_tokens_details[index] if batch.cached_tokens_details else None
    return (int(details["device"]), int(details.get("host", 0))) if details else (int(batch.cached_tokens[index]), 0)


def _settled(text: str, stops: list[str]) -> str:
    """``text`` without an unfinished character and without what may be the beginning of a stop string at its end."""
    text = text.rstrip(_UNFINISHED)
    unsure = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
    return text[: len(text) - unsure]
