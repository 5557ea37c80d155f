"""A gateway that answers at once and records what it did: as much of one as a replay can see."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from talaria.gpu.protocol import records
from talaria.gpu.protocol.agent import now_s
from talaria.policy.codec import CODEC
from talaria.policy.knobs import Knobs, with_values
from talaria.policy.snapshot import Capabilities

PAGE = 16


@dataclass
class FakeGateway:
    """``refuse``: statuses by call number; ``answers``: how many calls it takes before it goes away (None: all)."""

    models: tuple[str, ...] = ("big", "small")
    context_tokens: int = 100_000
    refuse: dict[int, int] = field(default_factory=dict)
    answers: int | None = None
    loses_row_after: int | None = None
    """The reset after which it reports one call to nobody."""
    broken: bool = False
    """No engine starts."""
    url: str = ""
    resets: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[tuple[str, str, list[int], list[int]]] = field(default_factory=list)
    """(session, model, prompt, output) of each call."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    live: int = 0
    most_live: int = 0
    _readers: list[asyncio.Queue[bytes]] = field(default_factory=list)

    @contextmanager
    def serving(self) -> Iterator[FakeGateway]:
        """In a thread of its own, on a free port."""
        ready, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready, done)), daemon=True)
        thread.start()
        assert ready.wait(60)
        try:
            yield self
        finally:
            done.set()
            thread.join(60)

    async def _serve(self, ready: threading.Event, done: threading.Event) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/admin/reset", self._reset)
        app.router.add_get("/admin/records", self._records)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        while not done.is_set():
            await asyncio.sleep(0.01)
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name, "max_model_len": self.context_tokens} for name in self.models]})

    async def _reset(self, request: web.Request) -> web.Response:
        self.resets.append(await request.json())
        can = {"g0": Capabilities(hkvr=False, staging=False, inflight_kv="recompute")}
        knobs = with_values(Knobs(), self.resets[-1]["knobs"])
        arguments = {"instances": CODEC.encode(can), "knobs": CODEC.encode(knobs), "output_tokens": CODEC.encode({})}
        self._tell(
            records.Begin(
                "fake", now_s(), self.resets[-1]["router"], arguments, {"g0": {"knobs": CODEC.encode(Knobs())}}, list(self.models), ["g0"]
            )
        )
        return web.json_response({})

    def _tell(self, record: records.Record) -> None:
        for reader in self._readers:
            reader.put_nowait(records.encode(record))

    async def _records(self, request: web.Request) -> web.StreamResponse:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._readers.append(queue)
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            while True:
                await response.write(await queue.get())
        return response

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.broken:
            return web.Response(status=502, text="no engine")
        body = await request.json()
        if isinstance(body["prompt"], str):  # the sample of words
            words = body["prompt"].split()
            ids = [100 + number for number in range(len(words))]
            return web.json_response({"choices": [{"text": "", "prompt_token_ids": ids, "token_ids": [1]}]})
        number, began_s = len(self.prompts), now_s()
        if self.answers is not None and number >= self.answers:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        output = [5000 + number * 7 + at for at in range(body["max_tokens"])]
        session = request.headers["x-session-id"]
        self.prompts.append((session, body["model"], body["prompt"], output))
        headers = {records.CALL_HEADER: str(number)}
        if number in self.refuse:
            self._row(number, session, body, [], began_s, "shed")
            return web.Response(status=self.refuse[number], text='{"error": "full"}', headers=headers)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        for token in output:
            await response.write(b"data: " + json.dumps({"choices": [{"index": 0, "text": "x", "token_ids": [token]}]}).encode() + b"\n\n")
            await asyncio.sleep(0)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(output), "prompt_tokens_details": {"cached_tokens": 0}}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n" + b"data: [DONE]\n\n")
        self.live -= 1
        self.spans.append((began_s, now_s()))
        self._row(number, session, body, output, began_s, "completed")
        return response

    def _row(self, number: int, session: str, body: dict[str, Any], output: list[int], began_s: float, outcome: str) -> None:
        placed = outcome == "completed"
        if len(self.resets) == self.loses_row_after:
            self.loses_row_after = None
            return
        self._tell(
            records.CallRow(
                number, "default", f"hash of {session}", "root", body["model"], 0, "g0" if placed else None, outcome, "", "cost", False,
                True, False, False, False, False, False, 0, 0, began_s, began_s if placed else -1.0, began_s if placed else -1.0,
                now_s(), now_s(), len(body["prompt"]), 0, 0, 0, len(output),
            )
        )  # fmt: skip
