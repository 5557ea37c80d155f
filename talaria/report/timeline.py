"""A run as a Chrome trace that opens in Perfetto: instances with rounds, slots, phases, switches and memory; sessions with calls.

Events are written one by one, so a long run costs no memory beyond its record. Times are whole microseconds, rounded at
both ends alike, so that what nests in the run also nests in the picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from talaria.report.columns import Columns
from talaria.report.parquet import FLAG_COLUMNS, KV_STATES
from talaria.report.record import NO_INSTANCE, NO_MODEL, OUTCOMES, PATHS, PHASES, REASONS, RunRecord

Event = dict[str, Any]

INSTANCE_LANES = ("rounds", "switches", "slots", "phases", "staging")
SESSIONS_PID = 1
"""Process of all session lanes; instances follow. Viewers give process 0 a meaning of their own."""


def write_timeline(record: RunRecord, path: Path) -> None:
    """Write the trace of ``record`` to ``path`` as JSON (Trace Event Format), one event a line. Same record, same bytes."""
    header = {"scenario": record.scenario, "config": record.config, "seed": record.seed}
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{_compact(header)},"traceEvents":[\n')
        for number, event in enumerate(trace_events(record)):
            file.write((",\n" if number else "") + _compact(event))
        file.write("\n]}\n")


def trace_events(record: RunRecord) -> Iterator[Event]:
    """The events of ``record``: names of processes and lanes first, then each table in its own order."""
    yield from _instance_names(record)
    yield from _rounds(record)
    yield from _switches(record)
    yield from _slots(record)
    if record.phases is not None:
        for instance, model, phase, started_s, ended_s in _rows(record.phases):
            name, of = PHASES[phase], record.models[model]
            lane = name if name in INSTANCE_LANES else "phases"
            yield _slice(_pid(instance), lane, of if lane == name else name, started_s, ended_s, {"model": of})
    if record.hbm_samples is not None:
        for instance, time_s, weights, kv, staged in _rows(record.hbm_samples):
            used = {"weights": weights / 2**30, "KV": kv / 2**30, "staged": staged / 2**30}
            yield {"ph": "C", "name": "HBM per GPU, GiB", "pid": _pid(instance), "ts": _us(time_s), "args": used}
    yield from _calls(record)


def _instance_names(record: RunRecord) -> Iterator[Event]:
    yield from _name("process", SESSIONS_PID, 0, "sessions", sort_index=len(record.instances) + 1)
    for number, instance in enumerate(record.instances):
        yield from _name("process", _pid(number), 0, f"instance {instance}", sort_index=number)
        for lane in INSTANCE_LANES:
            tid = INSTANCE_LANES.index(lane) + 1
            yield from _name("thread", _pid(number), tid, lane, sort_index=tid)


def _rounds(record: RunRecord) -> Iterator[Event]:
    rows = _rows(record.rounds)
    for instance, number, started_s, wall_s, active_s, switch_s, predicted_s, slots, admitted, parked, risk, infeasible in rows:
        args = {
            "active_s": active_s,
            "switch_s": switch_s,
            "predicted_s": predicted_s,
            "slots": slots,
            "sp_admitted": admitted,
            "parked": parked,
            "deadline_risk": risk,
            "infeasible": bool(infeasible),
        }
        yield _slice(_pid(instance), "rounds", f"round {number}", started_s, started_s + wall_s, args)


def _switches(record: RunRecord) -> Iterator[Event]:
    for row in _rows(record.switches):
        instance, _, source, target, started_s, total_s, *phases_s, path, coverage, dirty, d2d_bytes, h2d_bytes = row
        args = {
            "from": record.models[source] if source != NO_MODEL else None,
            "coverage": coverage,
            "dirty": dirty,
            "d2d_gib": d2d_bytes / 2**30,
            "h2d_gib": h2d_bytes / 2**30,
            **{f"p{index}_s": part_s for index, part_s in enumerate(phases_s, start=1)},
        }
        yield _slice(_pid(instance), "switches", f"{PATHS[path]} → {record.models[target]}", started_s, started_s + total_s, args)


def _slots(record: RunRecord) -> Iterator[Event]:
    for row in _rows(record.slots):
        instance, number, model, opened_s, closed_s, prefill_s, sp_s, decode_s, linger_s, p_admitted, sp_admitted, parked = row
        args = {
            "round": number,
            "prefill_s": prefill_s,
            "sp_s": sp_s,
            "decode_s": decode_s,
            "linger_s": linger_s,
            "p_admitted": p_admitted,
            "sp_admitted": sp_admitted,
            "parked": parked,
        }
        yield _slice(_pid(instance), "slots", record.models[model], opened_s, closed_s, args)


def _calls(record: RunRecord) -> Iterator[Event]:
    """One lane per line of a session; a call that overlaps its predecessor (an open-loop trace) gets a lane beside it."""
    ends_s: dict[tuple[int, int], list[float]] = {}
    lanes: dict[tuple[int, int, int], int] = {}
    for row in _rows(record.calls):
        call = dict(zip(record.calls.names, row, strict=True))
        start_s, line = call["enqueued_s"], (call["session"], call["line"])
        busy_until_s = ends_s.setdefault(line, [])
        beside = next((number for number, end_s in enumerate(busy_until_s) if end_s <= start_s), len(busy_until_s))
        busy_until_s[beside : beside + 1] = [start_s + call["e2e_s"]]
        lane = (*line, beside)
        if lane not in lanes:
            lanes[lane] = len(lanes) + 1
            yield from _name("thread", SESSIONS_PID, lanes[lane], _lane_name(record, lane), sort_index=lanes[lane])
        yield from _call(record, call, lanes[lane])


def _call(record: RunRecord, call: Event, tid: int) -> Iterator[Event]:
    start_s, outcome = call["enqueued_s"], OUTCOMES[call["outcome"]]
    ended_s = start_s + call["e2e_s"]
    args = {
        "outcome": outcome,
        "instance": record.instances[call["instance"]] if call["instance"] != NO_INSTANCE else None,
        "reason": REASONS[call["reason"]],
        "prefix": KV_STATES[call["kv_state"]],
        **{name: call[name] for name in record.calls.names if name.endswith("_tokens")},
        "rounds_waited": call["rounds_waited"],
        "parked": call["parked"],
        "flags": [name for name, flag in FLAG_COLUMNS.items() if call["flags"] & flag],
    }
    model = record.models[call["model"]]
    yield _slice(SESSIONS_PID, tid, f"turn {call['turn']} · {model}", start_s, ended_s, args)
    if outcome == "completed":
        bounds_s = (0.0, call["admitted_s"], call["ttft_s"], call["e2e_s"])
        for name, begin_s, end_s in zip(("queued", "prefill", "decode"), bounds_s, bounds_s[1:], strict=False):
            yield _slice(SESSIONS_PID, tid, name, start_s + begin_s, start_s + end_s, {})


def _lane_name(record: RunRecord, lane: tuple[int, int, int]) -> str:
    session, line, beside = lane
    name = record.session_names[session] if record.session_names else f"session {session}"
    return name + (f" · line {line}" if line else "") + (f" ({beside + 1})" if beside else "")


def _pid(instance: int) -> int:
    return SESSIONS_PID + 1 + instance


def _rows(columns: Columns) -> Iterator[tuple[Any, ...]]:
    return zip(*(columns[name].tolist() for name in columns.names), strict=True)


def _slice(pid: int, lane: str | int, name: str, started_s: float, ended_s: float, args: Event) -> Event:
    tid = INSTANCE_LANES.index(lane) + 1 if isinstance(lane, str) else lane
    start = _us(started_s)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": _us(ended_s) - start, "args": args}


def _name(kind: str, pid: int, tid: int, name: str, *, sort_index: int) -> Iterator[Event]:
    yield {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": sort_index}}


def _us(time_s: float) -> int:
    return round(time_s * 1e6)


def _compact(value: Event) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
