"""One repetition: a fresh policy at the gateway, a recording, the whole trace through HTTP, and the record of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from talaria.gpu.protocol import records
from talaria.gpu.run.client import Client
from talaria.gpu.run.collect import Collector
from talaria.gpu.run.plan import Case, ReplayPlan
from talaria.gpu.run.prompts import PromptBook
from talaria.gpu.run.replay import Replayer, Sent
from talaria.policy.codec import CODEC
from talaria.report.conservation import ConservationError
from talaria.report.declog import DecisionLog
from talaria.report.record import RunRecord, phase_columns
from talaria.report.replay import Differences, replay
from talaria.workload.arrivals import parse as parse_arrivals
from talaria.workload.session import Session
from talaria.workload.streams import stream

MOST_WARNINGS = 5
SETTLE_S = 60.0
"""How long after the last answer a record may be on its way."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """``began_s``: the decision log's time at the record's beginning. ``warnings`` say what the engines did otherwise than the trace."""

    record: RunRecord
    began_s: float
    differences: Differences
    warnings: Sequence[str]
    cpu_s: float


async def repetition(
    client: Client, plan: ReplayPlan, case: Case, seed: int, vocabulary: Mapping[str, Sequence[int]], log_path: Path,
    advance: Callable[[], None],
) -> Repetition:  # fmt: skip
    """Reset the gateway and replay the trace once; decisions go to ``log_path``, and are replayed at the end.

    ``advance`` is called once per call. Raises ConservationError if a call was lost on the way, InputError if the gateway refuses.
    """
    began_cpu_s = time.process_time()
    async with client.records() as stream_of_records:
        _, begin = await asyncio.gather(_reset(client, case), _begin(stream_of_records))
        record = RunRecord(begin.cluster, case.label, seed, tuple(begin.models), tuple(begin.instances))
        record.phases, record.session_names = phase_columns(), []
        with DecisionLog(log_path) as log:
            _write_header(log, begin, case, seed)
            collector = Collector(record, begin, log)
            await _replay(client, plan, seed, vocabulary, collector, stream_of_records, advance)
    differences = replay(log_path)
    leases = differences.leases
    record.leases_granted, record.leases_used = leases.granted, leases.used
    record.leases_unused = leases.granted - leases.used - leases.returned  # for one that is still live no call is left to come
    warnings = [f"{count} calls {what}" for what, count in collector.wrong.most_common(MOST_WARNINGS)]
    return Repetition(record, begin.now_s, differences, warnings, time.process_time() - began_cpu_s)


async def _reset(client: Client, case: Case) -> None:
    await client.admin("POST", "/admin/reset", {**case.document(), "record": True})


async def _begin(stream_of_records: AsyncIterator[records.Record]) -> records.Begin:
    async for item in stream_of_records:
        if isinstance(item, records.Begin):
            return item
    raise ConservationError("the gateway closed the recording before it began")


def _write_header(log: DecisionLog, begin: records.Begin, case: Case, seed: int) -> None:
    def decoded(arguments: Mapping[str, object]) -> dict[str, object]:
        return {name: CODEC.decode(value) for name, value in arguments.items()}

    log.header(
        scenario=begin.cluster, config=case.label, seed=seed, router=begin.router, router_arguments=decoded(begin.router_arguments),
        slots_arguments={instance: decoded(arguments) for instance, arguments in begin.slots_arguments.items()},
    )  # fmt: skip


async def _replay(
    client: Client, plan: ReplayPlan, seed: int, vocabulary: Mapping[str, Sequence[int]], collector: Collector,
    stream_of_records: AsyncIterator[records.Record], advance: Callable[[], None],
) -> None:  # fmt: skip
    workload, arrivals = plan.workload(), parse_arrivals(plan.arrivals)
    prompts = PromptBook(seed, vocabulary, workload.block_tokens, workload.block_scope)

    async def read() -> None:
        async for item in stream_of_records:
            collector.take(item)
        raise ConservationError("the gateway closed the recording")

    reader = asyncio.ensure_future(read())

    def sent(session: Session, call: Sent) -> None:
        collector.sent(session, call)
        advance()

    replayer = Replayer(client, prompts, sent, plan.gap_cap_s)
    schedule = arrivals.schedule(workload.sessions(), stream(seed, "arrivals"))
    sender = asyncio.ensure_future(_send_all(replayer.run(schedule, arrivals.pool), collector))
    try:
        await asyncio.wait((reader, sender), return_when=asyncio.FIRST_COMPLETED)
        if reader.done():
            reader.result()
        sender.result()
    finally:
        for task in (reader, sender):
            task.cancel()
        await asyncio.gather(reader, sender, return_exceptions=True)
    collector.finish()


async def _send_all(replaying: Coroutine[Any, Any, None], collector: Collector) -> None:
    """The replay, and then until the gateway has had its last word on every call. Raises what was first to go wrong in it."""
    try:
        await replaying
    except BaseExceptionGroup as group:
        raise _first(group) from None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while collector.open_calls:
                collector.news.clear()
                await collector.news.wait()


def _first(error: BaseException) -> BaseException:
    """Tasks within tasks fail in groups within groups; a user is told one thing."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
