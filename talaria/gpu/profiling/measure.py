"""Measurements on an idle cluster: calls through the gateway, timed by its records.

All times are the agent's: prefill is first token less admission, decode the rest of a batch's last sequence over its tokens, switches are
the engines' own phases. Rounds are so long that no grant ends inside a measurement. A call's overhead is the client's time to first token
less that prefill: two durations, so that the clocks of two processes need not agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from talaria.gpu.profiling.grid import (
    DECODE_TOKENS,
    NEW,
    SHARE_OF_KV,
    STAGING_TOKENS,
    Decode,
    Prefill,
    decode_points,
    prefill_points,
    restore_points,
)
from talaria.gpu.protocol import records
from talaria.gpu.protocol.agent import now_s
from talaria.gpu.run.client import Answer, Client, GatewayFailed, completion_body
from talaria.gpu.run.prompts import Ids
from talaria.policy.codec import CODEC
from talaria.policy.snapshot import InstanceSnapshot
from talaria.profiles.points import DecodePoint, PrefillPoint

ROUTER = "session-sticky"
KNOBS = {"t_ttft": 600.0, "t_tpot": 0.5, "gamma": 1.0, "linger": 0.0, "tau": 0.0, "overload": "queue", "stage_rate": 0.0}
"""One session stays on one instance, and a grant is 1,200 decode steps."""
STAGING_KNOBS = {**KNOBS, "visit_idle": True, "stage_rate": 1.0, "t_tpot": 0.001}
"""Every round goes on to the other models, which are staged beside the call of the one that serves; no decode is so fast that it would not
get all of a round, so that a call ends in its first slot."""
SWITCH_ROUNDS = 8
OVERHEAD_CALLS = 16
"""Of each model, one at a time."""
OVERHEAD_TOKENS = 8
LEAST_STEP_S = 1e-5
ROW_S = 30.0


@dataclass(slots=True)
class ModelMeasured:
    """Points in the form of ``talaria.profiles``; ratios are repetitions over their median."""

    kv_tokens: int
    context_tokens: int
    prefill: list[PrefillPoint] = field(default_factory=list)
    decode: list[DecodePoint] = field(default_factory=list)
    prefill_ratios: list[float] = field(default_factory=list)
    decode_ratios: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Restored:
    """A prefix of so many tokens came back from the host, and took so much longer than one that was on the device."""

    model: str
    tokens: int
    seconds: float


@dataclass(slots=True)
class Measured:
    models: dict[str, ModelMeasured] = field(default_factory=dict)
    switches: list[records.SwitchRow] = field(default_factory=list)
    """With nothing staged."""
    staged: list[records.SwitchRow] = field(default_factory=list)
    """Beside a model that served."""
    restored: list[Restored] = field(default_factory=list)
    overheads_s: list[float] = field(default_factory=list)
    """Of calls of all models."""


class Meter:
    """One recording on an idle gateway. ``read`` has to run beside the measurements."""

    def __init__(self, client: Client, stream: AsyncIterator[records.Record], vocabulary: dict[str, list[int]], repeats: int) -> None:
        self._client, self._stream, self.repeats = client, stream, repeats
        self._vocabulary = {model: np.array(ids, np.uint32) for model, ids in vocabulary.items()}
        self._rows: dict[int, records.CallRow] = {}
        self._news = asyncio.Condition()
        self._draws = np.random.default_rng()
        self.free_kv_tokens: dict[str, int] = {}
        self.switches: list[records.SwitchRow] = []

    async def read(self) -> None:
        async for item in self._stream:
            if isinstance(item, records.SwitchRow):
                async with self._news:
                    self.switches.append(item)
                    self._news.notify_all()
            elif isinstance(item, records.DecisionLine):
                self._decision(item.line)
            elif isinstance(item, records.CallRow):
                async with self._news:
                    self._rows[item.call] = item
                    self._news.notify_all()

    def _decision(self, line: str) -> None:
        if '"do":"observe"' not in line:
            return
        snapshot = CODEC.decode(json.loads(line)["args"])[0]
        assert isinstance(snapshot, InstanceSnapshot)
        for name, model in snapshot.models.items():
            self.free_kv_tokens[name] = max(self.free_kv_tokens.get(name, 0), model.free_kv_tokens)

    # --- what is measured ------------------------------------------------------------------------------------------

    async def prefill(self, model: str, point: Prefill, into: ModelMeasured) -> None:
        times_ms, tokens, cached = [], 0, 0
        for _ in range(self.repeats):
            prefix = self._drawn(model, point.cached)
            if point.cached:
                await self._call(model, prefix, 1)
            row = (await self._call(model, np.concatenate([prefix, self._drawn(model, point.new)]), 1))[1]
            tokens, cached = row.prompt_tokens, row.device_tokens
            times_ms.append(1e3 * (row.first_token_s - row.admitted_s))
        into.prefill.append(PrefillPoint(tokens=tokens, cached=cached, ms=median(times_ms)))
        into.prefill_ratios += [each / median(times_ms) for each in times_ms]

    async def decode(self, model: str, point: Decode, into: ModelMeasured) -> None:
        steps_ms = []
        for _ in range(self.repeats):
            calls = (self._call(model, self._drawn(model, point.context), DECODE_TOKENS) for _ in range(point.batch))
            steps_ms.append(1e3 * step_s([row for _, row in await asyncio.gather(*calls)]))
        into.decode.append(DecodePoint(batch=point.batch, context=point.context + DECODE_TOKENS // 2, ms=median(steps_ms)))
        into.decode_ratios += [each / median(steps_ms) for each in steps_ms]

    async def overhead_s(self, model: str) -> float:
        """Of a tiny call of the active model on an idle instance: its client's time to first token less its prefill."""
        prompt = self._drawn(model, OVERHEAD_TOKENS)
        began_s = now_s()
        answer, row = await self._call(model, prompt, 1)
        return max(0.0, (answer.first_token_s - began_s) - (row.first_token_s - row.admitted_s))

    async def restored(self, model: str, other: str, tokens: int) -> Restored | None:
        """A prefix that has gone to the host while ``other`` was active, and the same on the device; None where nothing came back."""
        rows = []
        prefix = self._drawn(model, tokens)
        await self._call(model, prefix, 1)
        await self.touch(other)
        for _ in range(2):
            rows.append((await self._call(model, np.concatenate([prefix, self._drawn(model, NEW[0])]), 1))[1])
        first_s, again_s = (row.first_token_s - row.admitted_s for row in rows)
        return Restored(model, rows[0].host_tokens, max(0.0, first_s - again_s)) if rows[0].host_tokens else None

    async def beside(self, model: str, tokens: int) -> float:
        """A call of so many tokens, beside which the next model is staged; the share of it that was there at the switch to it.

        The last model of a round is left at the beginning of the next one.
        """
        known = len(self.switches)
        await self._call(model, self._drawn(model, 32), tokens)
        await self.touch(model)
        async with asyncio.timeout(ROW_S), self._news:
            await self._news.wait_for(lambda: any(row.source == model for row in self.switches[known:]))
        return next(row.coverage for row in self.switches[known:] if row.source == model)

    async def touch(self, model: str) -> None:
        """A short call, so that the model is active afterwards."""
        await self._call(model, self._drawn(model, 32), 2)

    def _drawn(self, model: str, tokens: int) -> Ids:
        return self._draws.choice(self._vocabulary[model], tokens)

    async def _call(self, model: str, prompt: Ids, output_tokens: int) -> tuple[Answer, records.CallRow]:
        answer = await self._client.send("profile", completion_body(model, prompt, output_tokens))
        if answer.outcome != "completed" or answer.number is None:
            raise GatewayFailed(f"a call of {model} {answer.outcome}: {answer.why}")
        number = answer.number
        try:
            async with asyncio.timeout(ROW_S), self._news:
                await self._news.wait_for(lambda: number in self._rows)
        except TimeoutError:
            raise GatewayFailed(f"its records say nothing of a call of {model} that has ended") from None
        return answer, self._rows.pop(number)


def step_s(rows: Sequence[records.CallRow]) -> float:
    """Seconds of a decode step of a batch: by the sequence that began last, which no other's prefill interrupts."""
    last = max(rows, key=lambda row: row.first_token_s)
    return max(LEAST_STEP_S, (last.ended_s - last.first_token_s) / max(1, last.output_tokens - 1))


class Group(NamedTuple):
    """An instance that takes turns between models."""

    models: Sequence[str]
    keeps: bool
    """KV of its models on the host."""
    stages: bool
    """The next one's weights beside the one that serves."""


async def measure(
    client: Client, models: dict[str, int | None], groups: Sequence[Group], max_running: int, most_tokens: int, repeats: int,
    advance: Callable[[], None], total: Callable[[int], None],
) -> Measured:  # fmt: skip
    """Measure ``models`` (served name: longest prompt), and switches in the largest of ``groups``.

    ``total`` is told how many measurements there are at the least, ``advance`` is called after each.
    """
    vocabulary = {model: await client.vocabulary(model) for model in models}
    group = max(groups, key=lambda group: len(group.models), default=Group((), keeps=False, stages=False))
    async with _meter(client, KNOBS, vocabulary, repeats) as meter:
        found = await _all(meter, models, group, max_running, most_tokens, advance, total)
    if group.stages and len(group.models) > 1:
        async with _meter(client, STAGING_KNOBS, vocabulary, repeats) as meter:
            found.staged = await _staged(meter, group.models, most_tokens, advance)
    return found


@contextlib.asynccontextmanager
async def _meter(client: Client, knobs: Mapping[str, object], vocabulary: dict[str, list[int]], repeats: int) -> AsyncIterator[Meter]:
    """On a cluster that begins anew."""
    async with client.records() as stream:
        await client.admin("POST", "/admin/reset", {"router": ROUTER, "knobs": knobs, "session_prefill": True, "record": True})
        meter = Meter(client, stream, vocabulary, repeats)
        reader = asyncio.create_task(meter.read())
        try:
            yield meter
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def _all(
    meter: Meter, models: dict[str, int | None], group: Group, max_running: int, most_tokens: int, advance: Callable[[], None],
    total: Callable[[int], None],
) -> Measured:  # fmt: skip
    found, plans = Measured(), {}
    for model, takes in models.items():
        await meter.touch(model)
        kv_tokens = meter.free_kv_tokens.get(model, 0) or most_tokens
        longest = min(takes or most_tokens, most_tokens, kv_tokens)
        plans[model] = prefill_points(longest), decode_points(longest, kv_tokens, max_running)
        found.models[model] = ModelMeasured(kv_tokens, takes or longest)
    turns = group.models if len(group.models) > 1 else ()
    points = sum(OVERHEAD_CALLS + len(prefills) + len(decodes) for prefills, decodes in plans.values())
    total(points + SWITCH_ROUNDS * len(turns) * (1 + group.stages))
    for model, (prefills, decodes) in plans.items():
        await meter.touch(model)
        await meter.touch(model)
        for _ in range(OVERHEAD_CALLS):
            found.overheads_s.append(await meter.overhead_s(model))
            advance()
        for prefill in prefills:
            await meter.prefill(model, prefill, found.models[model])
            advance()
        for decode in decodes:
            await meter.decode(model, decode, found.models[model])
            advance()
    if group.keeps and turns:
        found.restored = await _restored(meter, turns, found.models, most_tokens)
    meter.switches.clear()
    for _ in range(SWITCH_ROUNDS):
        for model in turns:
            await meter.touch(model)
            advance()
    found.switches = list(meter.switches)
    return found


async def _restored(meter: Meter, turns: Sequence[str], found: Mapping[str, ModelMeasured], most_tokens: int) -> list[Restored]:
    """Each model's prefixes, with the next one active in between."""
    restored = []
    for model, other in itertools.pairwise((*turns, turns[0])):
        longest = min(most_tokens, found[model].context_tokens, int(SHARE_OF_KV * found[model].kv_tokens))
        restored += [await meter.restored(model, other, tokens) for tokens in restore_points(longest) for _ in range(meter.repeats)]
    return [item for item in restored if item is not None]


async def _staged(meter: Meter, turns: Sequence[str], most_tokens: int, advance: Callable[[], None]) -> list[records.SwitchRow]:
    """Switches from calls that are long enough for the next model to be there by their end, if any is."""
    for model in turns:
        enough = STAGING_TOKENS[0]
        for tokens in (tokens for tokens in STAGING_TOKENS if tokens < most_tokens // 2):
            enough = tokens
            if await meter.beside(model, tokens) == 1.0:
                break
        for _ in range(SWITCH_ROUNDS):
            await meter.beside(model, enough)
            advance()
    return list(meter.switches)
