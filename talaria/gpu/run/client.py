"""The replay's side of HTTP: one call as a stream of token ids, and the gateway's admin endpoints.

Calls go to ``/v1/completions`` with their prompt as token ids, which that endpoint takes and on request also gives back: so
prompts have exactly the recorded lengths and continue exactly what the engine said, whatever template or tokenizer a model has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from talaria.errors import InputError
from talaria.gpu.protocol import records
from talaria.gpu.protocol.agent import now_s
from talaria.gpu.run.prompts import Ids

T = TypeVar("T")

OVERLOADED = (429, 503)
"""A call that is answered with one of these was shed."""
SESSION_HEADER = "x-session-id"
READER_GONE_S = 10.0
SAMPLE = (
    "the a an and or but if then else while for not is are was were be been has have had do does did will would can could should may "
    "might must one two three four five six seven eight nine ten first second third last next new old big small good bad high low "
    "long short left right up down in out on off over under with without from to at by of as into about after before between through "
    "during against read write open close find make take give get put run test file line code name list map set key value type class "
    "function return call user system tool result error data time day year man woman child world life hand part place case week work "
    "point home water room mother area money story fact month lot study book eye job word business issue side kind head house service "
    "friend father power hour game quick brown fox jumps lazy dog pass fail assistant"
)
"""Ordinary words: the ids that a model's tokenizer makes of them are what prompts are drawn from."""
FEWEST_IDS = 16
EXPECTED = "a Talaria gateway"


class GatewayFailed(RuntimeError):
    """The gateway ended, did not become ready, or failed at something that is no fault of the question."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A gateway. ``key`` is a client's, ``admin_key`` the administrator's; None where it asks for none."""

    url: str
    key: str | None = None
    admin_key: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """How one call ended: ``completed``, ``shed`` or ``failed``. Times in seconds on the clock of ``now_s``."""

    outcome: str
    why: str
    number: int | None
    """The gateway's own, where it answered at all."""
    first_token_s: float
    ended_s: float
    output: Ids
    prompt_tokens: int = 0
    cached_tokens: int = 0


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_chunk = msgspec.json.Decoder(_Chunk).decode


def completion_body(model: str, prompt: Ids, output_tokens: int) -> bytes:
    """Of a streamed call that ends after exactly ``output_tokens``."""
    return msgspec.json.encode({
        "model": model, "prompt": prompt.tolist(), "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    })  # fmt: skip


class Client:
    """``http`` is left open: it is its maker's."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self._http, self._endpoint = http, endpoint

    async def send(self, session: str, body: bytes) -> Answer:
        """One streamed call with a ``completion_body``. Never raises for what the other side does."""
        headers = {**self._headers(self._endpoint.key), SESSION_HEADER: session, "content-type": "application/json"}
        try:
            async with self._http.post(f"{self._endpoint.url}/v1/completions", data=body, headers=headers) as response:
                number = _number(response.headers.get(records.CALL_HEADER))
                if response.status != 200:
                    why = f"{response.status}: {(await response.text())[:200]}"
                    outcome = "shed" if response.status in OVERLOADED else "failed"
                    return Answer(outcome, why, number, -1.0, now_s(), _ids([]))
                return await _read(response.content, number)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            return Answer("failed", f"{type(error).__name__}: {error}", None, -1.0, now_s(), _ids([]))

    async def vocabulary(self, model: str) -> list[int]:
        """Ordinary token ids of ``model``, as its own engine makes them of ordinary words. Raises InputError, GatewayFailed."""
        body = {"model": model, "prompt": SAMPLE, "max_tokens": 1, "return_token_ids": True}
        answer = await self._json("POST", "/v1/completions", self._endpoint.key, body)
        choices = self._shaped(answer, _Chunk, "/v1/completions").choices
        ids = sorted(set((choices[0].prompt_token_ids or [])[1:] if choices else []))  # the first may be a mark of the beginning
        if len(ids) < FEWEST_IDS:
            raise InputError(f"model {model!r} gives no token ids", where=self._endpoint.url, fix="serve it with SGLang 0.5.23 or later")
        return ids

    async def models(self) -> dict[str, int | None]:
        """Served names (aliases are none), with the most tokens that each takes where the gateway says so. Raises InputError."""
        answer = await self._json("GET", "/v1/models", self._endpoint.key)
        cards = self._shaped(answer, _Cards, "/v1/models").data
        return {card.id: card.max_model_len for card in cards if card.root in (None, card.id)}

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        """An admin endpoint's answer. Raises InputError or GatewayFailed with what it says."""
        return await self._json(method, path, self._endpoint.admin_key, body)

    @asynccontextmanager
    async def records(self) -> AsyncIterator[AsyncIterator[records.Record]]:
        """The gateway's records from now on. Raises InputError where it does not give them."""
        url, headers = f"{self._endpoint.url}/admin/records", self._headers(self._endpoint.admin_key)
        try:
            async with await self._reading(url, headers) as response:
                if response.status != 200:
                    fix = "check the admin key" if response.status in (401, 403, 404) else ""
                    raise InputError(f"answers {response.status}: {(await response.text())[:200]}", where=url, fix=fix)
                yield _records(response.content, url)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InputError(f"cannot be read: {str(error) or 'no answer in time'}", where=url, fix="is the gateway up?") from None

    async def _reading(self, url: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """The answer. A gateway takes a moment to see that its last reader has gone, and tells nobody: it is asked again."""
        until_s = now_s() + READER_GONE_S
        while True:
            response = await self._http.get(url, headers=headers)
            if response.status != 409 or now_s() > until_s:
                return response
            response.close()
            await asyncio.sleep(0.1)

    async def _json(self, method: str, path: str, key: str | None, body: Any = None) -> Any:
        url = f"{self._endpoint.url}{path}"
        try:
            async with self._http.request(method, url, json=body, headers=self._headers(key)) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise InputError(f"cannot be reached: {str(error) or 'no answer in time'}", where=url, fix="is the gateway up?") from None
        if response.status >= 500:
            raise GatewayFailed(f"{url} answers {response.status}: {text[:300]}")
        if response.status != 200:
            fix = "check the keys" if response.status in (401, 403) else ""
            raise InputError(f"answers {response.status}: {text[:200]}", where=url, fix=fix)
        try:
            return msgspec.json.decode(text) if text.strip() else None
        except msgspec.DecodeError:
            raise InputError("answers no JSON", where=url, allowed=EXPECTED) from None

    def _shaped(self, answer: Any, shape: type[T], path: str) -> T:
        try:
            return msgspec.convert(answer, shape)
        except msgspec.ValidationError as error:
            raise InputError(f"answers what is not expected ({error})", where=self._endpoint.url + path, allowed=EXPECTED) from None

    @staticmethod
    def _headers(key: str | None) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"} if key else {}


async def _read(content: aiohttp.StreamReader, number: int | None) -> Answer:
    """A stream of chunks to its end. One that breaks off, or says an error, is a failed call.

    The end is read too: a client that hangs up after the last chunk is, to a gateway, one that went away.
    """
    first_s = ended_s = -1.0
    output, usage, why = list[int](), _Usage(), "the stream broke off"
    async for line in _lines(content):
        data = line[5:].strip()
        if not line.startswith(b"data:") or ended_s >= 0.0:
            continue
        if data == b"[DONE]":
            why, ended_s = "", now_s()
            continue
        chunk = _chunk(data)
        if chunk.error is not None:
            why, ended_s = str(chunk.error)[:200], now_s()
            continue
        for choice in chunk.choices:
            output += choice.token_ids or ()
        if first_s < 0.0 and output:
            first_s = now_s()
        usage = chunk.usage or usage
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens if details else None) or 0
    ended_s = ended_s if ended_s >= 0.0 else now_s()
    return Answer("failed" if why else "completed", why, number, first_s, ended_s, _ids(output), usage.prompt_tokens, cached)


async def _records(content: aiohttp.StreamReader, url: str) -> AsyncIterator[records.Record]:
    """Raises InputError for what is none."""
    async for line in _lines(content):
        if line.strip():
            try:
                record = records.decode(line)
            except msgspec.DecodeError as error:
                raise InputError(f"gives what is no record ({error})", where=url, allowed=EXPECTED) from None
            yield record


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: a first chunk repeats the prompt's ids, and aiohttp's own lines end at 128 KiB."""
    rest = b""
    async for block in content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, np.uint32)
