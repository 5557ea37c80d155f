"""Clients for tests of a served cluster: every answer is read to its end and judged by the format of its own endpoint."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.gpu.cluster import ADMIN_KEY, KEY, Cluster

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
LIMIT_NAMES = {CHAT: "max_completion_tokens", COMPLETIONS: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ended for its client."""

    path: str
    outcome: str
    """``completed``, ``refused`` (an error in place of an answer), ``broken off`` (an error in a stream), ``left`` (by the client); all
    else is a fault of ours: ``cut off``, ``malformed: ...``."""
    text: str = ""
    status: int = 0
    number: int | None = None
    """What the gateway calls it."""
    why: str = ""


CLEAN = {"completed", "refused", "broken off", "left"}


def body_of(path: str, model: str, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "stream": stream, LIMIT_NAMES[path]: tokens, "temperature": 0, "ignore_eos": True}
    if path == COMPLETIONS:
        return body | {"prompt": prompt}
    return body | ({"input": prompt} if path == RESPONSES else {"messages": [{"role": "user", "content": prompt}]})


class Caller:
    def __init__(self, cluster: Cluster, http: aiohttp.ClientSession) -> None:
        self._cluster, self._http = cluster, http
        self.endings: list[Ending] = []
        self.talking = 0
        """Streams under way that have text already."""

    async def ask(
        self, model: str, prompt: str, tokens: int, *, path: str = CHAT, session: str | None = None, stream: bool = True,
        leave_after: int | None = None,
    ) -> Ending:  # fmt: skip
        """One call. ``leave_after``: hang up after so many events."""
        ending = await self._ask(path, body_of(path, model, prompt, tokens, stream), session, leave_after)
        self.endings.append(ending)
        return ending

    async def _ask(self, path: str, body: dict[str, Any], session: str | None, leave_after: int | None) -> Ending:
        headers = {"Authorization": f"Bearer {KEY}", **({"X-Session-Id": session} if session else {})}
        number = None
        try:
            async with self._http.post(self._cluster.url + path, json=body, headers=headers) as response:
                found = response.headers.get("x-talaria-call")
                number = int(found) if found is not None else None
                if response.status != 200:
                    return _refused(path, response.status, await response.text(), number)
                if not body["stream"]:
                    return Ending(path, "completed", _text_of(path, await response.json()), 200, number)
                return await self._stream(path, response, number, leave_after)
        except (aiohttp.ClientError, OSError) as error:
            return Ending(path, "cut off", why=f"{type(error).__name__}: {error}", number=number)

    async def _stream(self, path: str, response: aiohttp.ClientResponse, number: int | None, leave_after: int | None) -> Ending:
        if leave_after == 0:
            return Ending(path, "left", number=number)
        events, text, talking = 0, "", 0
        try:
            async for line in response.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if (error := _error_in(path, event)) is not None:
                    return Ending(path, "broken off" if error else "malformed: an error without words", text, 200, number, error)
                text += _delta_of(path, event)
                if text and not talking:
                    talking = 1
                    self.talking += 1
                events += 1
                if _is_last(path, event):
                    await response.read()
                    return Ending(path, "completed", text, 200, number)
                if leave_after is not None and events >= leave_after:
                    response.close()
                    return Ending(path, "left", text, 200, number)
        finally:
            self.talking -= talking
        return Ending(path, "malformed: a stream without an end", text, 200, number)

    def tally(self) -> Counter[str]:
        """Outcomes so far. Fails for an ending that no client should see."""
        unclean = [ending for ending in self.endings if ending.outcome not in CLEAN]
        assert not unclean, unclean[:3]
        return Counter(ending.outcome for ending in self.endings)


def _refused(path: str, status: int, text: str, number: int | None) -> Ending:
    try:
        document = json.loads(text)
    except ValueError:
        return Ending(path, "malformed: an error that is no JSON", text[:200], status, number)
    error = document.get("error")
    if document.get("object") == "error" and path in (CHAT, COMPLETIONS):  # as SGLang itself writes it
        error = document
    right = isinstance(error, dict) and bool(error.get("message")) and bool(error.get("type"))
    if path == MESSAGES:
        right = right and document.get("type") == "error"
    return Ending(path, "refused" if right else f"malformed: {text[:200]}", "", status, number, str((error or {}).get("message")))


def _error_in(path: str, event: dict[str, Any]) -> str | None:
    """The words of an error event of this endpoint; empty where it has none, None for any other event."""
    if path == RESPONSES:
        return str(event.get("message", "")) if event["type"] == "error" else None
    if path == MESSAGES and event["type"] != "error":
        return None
    error = event.get("error")
    return None if error is None else str(error.get("message", ""))


def _delta_of(path: str, event: dict[str, Any]) -> str:
    if path == CHAT:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in event["choices"])
    if path == MESSAGES:
        return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _is_last(path: str, event: dict[str, Any]) -> bool:
    if path in (CHAT, COMPLETIONS):
        return any(choice["finish_reason"] for choice in event["choices"])
    return event["type"] in ("message_stop", "response.completed", "response.incomplete")


def _text_of(path: str, answer: dict[str, Any]) -> str:
    if path == CHAT:
        return str(answer["choices"][0]["message"]["content"])
    if path == COMPLETIONS:
        return str(answer["choices"][0]["text"])
    parts = answer["content"] if path == MESSAGES else answer["output"][0]["content"]
    return "".join(part["text"] for part in parts)


class Books:
    """The gateway's own account of all calls: its recording, read along."""

    def __init__(self, cluster: Cluster, http: aiohttp.ClientSession) -> None:
        self._cluster, self._http = cluster, http
        self.rows: list[dict[str, Any]] = []
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin a recording."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        stream = await self._http.get(f"{self._cluster.url}/admin/records", headers=headers)
        assert stream.status == 200, await stream.text()
        self._reading = asyncio.create_task(self._read(stream))
        async with self._http.post(f"{self._cluster.url}/admin/reset", json={"record": True}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()

    async def _read(self, stream: aiohttp.ClientResponse) -> None:
        async with stream:
            async for line in stream.content:
                record = json.loads(line)
                if record["record"] == "CallRow":
                    self.rows.append(record)

    async def agree(self, endings: Iterable[Ending]) -> None:
        """Every call of a client is in the books once, with the outcome that its client saw. Waits for the last rows."""
        seen = list(endings)
        await until("the books are complete", lambda: len(self.rows) >= len(seen))
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        outcomes = {row["call"]: row["outcome"] for row in self.rows}
        assert len(outcomes) == len(self.rows) == len(seen)
        for ending in seen:
            if ending.outcome == "completed":
                assert ending.number is not None and outcomes[ending.number] == "completed", ending
            elif ending.number is not None and ending.outcome != "left":
                assert outcomes[ending.number] in ("failed", "shed"), ending


async def until(what: str, condition: Any, timeout_s: float = 120.0) -> None:
    """Wait for a condition, plain or awaitable. Raises TimeoutError with ``what``."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return
        if loop.time() > end_s:
            raise TimeoutError(f"after {timeout_s:g} s: {what}")
        await asyncio.sleep(0.02)
