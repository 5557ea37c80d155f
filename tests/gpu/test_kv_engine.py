"""The mirror of a real engine says before every call what the engine will find, over many turns, evictions included."""

from __future__ import annotations

import asyncio
import random
from array import array
from pathlib import Path

import aiohttp
import pytest

from talaria.gpu import config
from talaria.gpu.engine.engine import Engine
from talaria.gpu.engine.holds import HoldServer
from talaria.gpu.kv.hashes import PageChain

KV_TOKENS, SESSIONS, TURNS = 2000, 8, 240
PATIENCE_S = 600.0


class Sessions:
    """Conversations that grow turn by turn, some with a common beginning, against one engine."""

    def __init__(self, engine: Engine, session: aiohttp.ClientSession) -> None:
        self.engine, self._session = engine, session
        self.random = random.Random(7)
        shared = self.words(70)
        self.tokens = [(shared if number % 2 else []) + self.words(40) for number in range(SESSIONS)]
        self.predicted: list[int] = []
        self.found: list[int] = []
        self.evicted = 0
        """Turns before which the engine had lost some of the session's last call."""

    def words(self, count: int) -> list[int]:
        return [self.random.randrange(4, 420) for _ in range(count)]

    def chain(self, tokens: list[int]) -> PageChain:
        return PageChain(self.engine.mirror.page_tokens, array("I", tokens).tobytes())

    async def turn(self) -> None:
        """One call of one session: what it adds to the last answer, or, now and then, a conversation that begins anew."""
        number = self.random.randrange(SESSIONS)
        tokens = self.tokens[number]
        self.evicted += self.found_tokens(tokens) < self.kept_tokens(tokens)
        if len(tokens) > 600:
            tokens = tokens[: self.random.randrange(1, 120)]
        prompt = tokens + self.words(self.random.randrange(1, 60))
        self.predicted.append(self.found_tokens(prompt))
        limits = {"max_new_tokens": self.random.randrange(1, 30), "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": limits}
        async with self._session.post(f"{self.engine.url}/generate", json=body, raise_for_status=True) as answer:
            said = await answer.json()
        self.found.append(said["meta_info"]["cached_tokens"])
        self.tokens[number] = prompt + said["output_ids"]
        while self.found_tokens(self.tokens[number]) < self.kept_tokens(self.tokens[number]):  # the last events that the call brings
            await asyncio.sleep(0.002)

    def found_tokens(self, tokens: list[int]) -> int:
        return self.engine.mirror.device_tokens(self.chain(tokens))

    def kept_tokens(self, tokens: list[int]) -> int:
        """Of a call that has just ended: all but the last token have KV, and whole pages are kept."""
        page = self.engine.mirror.page_tokens
        return (len(tokens) - 1) // page * page


@pytest.mark.parametrize("page", [16, pytest.param(1, marks=pytest.mark.full)])
def test_the_mirror_equals_what_the_engine_finds(tiny_models: Path, cpu_engine: config.Engine, tmp_path: Path, page: int) -> None:
    async def main() -> Sessions:
        holds = HoldServer(lambda model, message: None, lambda model: None)
        await holds.start(tmp_path / "holds")
        settings = cpu_engine.model_copy(update={"page_tokens": page})
        model = config.Model(path=str(tiny_models / "qwen3"), kv_tokens=KV_TOKENS)
        engine = Engine("big", model, config.Instance(name=f"page{page}", models=("big",), max_running=8), settings, holds, print)
        try:
            async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
                await engine.start()
                sessions = Sessions(engine, session)
                for _ in range(TURNS):
                    await sessions.turn()
                return sessions
        finally:
            await engine.stop()
            await holds.stop()

    sessions = asyncio.run(main())
    assert sessions.predicted == sessions.found
    assert sum(found > 0 for found in sessions.found) > TURNS // 2
    assert 0 < sessions.evicted < TURNS // 2
