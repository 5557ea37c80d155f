"""Run records as Parquet tables and back, without loss: one file per kind of row, one row group per seed.

Columns keep the record's names and units. Codes are written as names, ``*_s`` of a call are durations from
``enqueued_s``, and added columns spare a reader the arithmetic: ``*_at_s`` are absolute times, ``ttft_local_s`` is the
request-local TTFT (submission to an instance → first token, SPEC §6), flags are spelled out as booleans.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from talaria.errors import InputError
from talaria.report import record as flags
from talaria.report.columns import Columns
from talaria.report.record import NO_INSTANCE, NO_MODEL, OUTCOMES, PATHS, REASONS, RunRecord, hbm_columns

TABLES = ("calls", "rounds", "slots", "switches", "hbm_samples")
SCALARS = (
    "scenario", "config", "seed", "models", "instances", "session_parents", "leases_granted", "leases_used", "leases_unused",
    "restore_skips", "host_capacity_misses", "peak_hbm_bytes", "largest_batch", "deadline_risk", "makespan_s", "events",
)  # fmt: skip
KV_STATES = ("device", "host", "missing")
NOWHERE = {"instance": NO_INSTANCE, "source": NO_MODEL}
"""Columns that may hold none of their names, with the code of none."""

FLAG_COLUMNS = {
    "is_return": flags.FLAG_RETURN,
    "residency_hit": flags.FLAG_RESIDENCY_HIT,
    "opens_model": flags.FLAG_OPEN,
    "avoidable_open": flags.FLAG_AVOIDABLE,
    "same_instance": flags.FLAG_SAME_INSTANCE,
    "session_prefill": flags.FLAG_SP,
    "lease_hit": flags.FLAG_LEASE_HIT,
    "warmup": flags.FLAG_WARMUP,
}
METADATA = b"talaria.record"


class RecordWriter:
    """Writes records into ``directory``, one after the other; ``close`` completes the files. Same records, same bytes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, Any] = {}
        self._scalars: list[dict[str, Any]] = []

    def add(self, record: RunRecord) -> None:
        import pyarrow.parquet as pq

        for name in TABLES:
            columns: Columns | None = getattr(record, name)
            if columns is None:
                continue
            table = _table(record, name, columns)
            if name not in self._writers:
                self._writers[name] = pq.ParquetWriter(self._directory / file_name(name), table.schema, compression="zstd")
            self._writers[name].write_table(table)
        self._scalars.append({name: getattr(record, name) for name in SCALARS})

    def close(self) -> None:
        """Complete the files; without effect a second time."""
        if "calls" in self._writers:
            self._writers["calls"].add_key_value_metadata({METADATA: json.dumps(self._scalars, sort_keys=True)})
        while self._writers:
            self._writers.popitem()[1].close()


def file_name(table: str) -> str:
    """``calls.parquet`` and so on; samples of the HBM footprint are ``hbm.parquet``."""
    return f"{table.removesuffix('_samples')}.parquet"


def read_records(directory: Path) -> list[RunRecord]:
    """The records that ``RecordWriter`` wrote, without phases. Raises InputError if a file is missing or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = directory / file_name("calls")
    try:
        metadata = pq.read_metadata(path).metadata
        records = {scalars["seed"]: _empty(scalars) for scalars in json.loads(metadata[METADATA])}
        for name in TABLES:
            path = directory / file_name(name)
            if name != "hbm_samples" or path.exists():
                _fill(records, name, pq.read_table(path))
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, OverflowError) as error:
        why = f"cannot be read ({type(error).__name__}: {error})"
        raise InputError(why, where=str(path), allowed="a table that `talaria-sim run --out DIR` wrote") from None
    return list(records.values())


def _names(record: RunRecord, column: str) -> Sequence[str] | None:
    """What the codes of ``column`` stand for, or ``None`` for a column of plain numbers."""
    known = {
        "instance": record.instances,
        "model": record.models,
        "source": record.models,
        "target": record.models,
        "outcome": OUTCOMES,
        "reason": REASONS,
        "path": PATHS,
        "kv_state": KV_STATES,
    }
    return known.get(column)


def _table(record: RunRecord, name: str, columns: Columns) -> Any:
    import numpy as np
    import pyarrow as pa

    data: dict[str, Any] = {"seed": pa.array(np.full(len(columns), record.seed, dtype=np.int64))}
    for column in columns.names:
        values, names = columns[column], _names(record, column)
        if names is None:
            data[column] = pa.array(values)
        else:
            none = values == NOWHERE.get(column, -2)
            codes = pa.array(np.where(none, 0, values).astype(np.int32), mask=none)
            data[column] = pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string()))
    if name == "calls":
        data |= _derived(record)
    return pa.table(data)


def _derived(record: RunRecord) -> dict[str, Any]:
    import numpy as np
    import pyarrow as pa

    calls, names = record.calls, record.session_names
    bits, enqueued_s, session = calls["flags"], calls["enqueued_s"], calls["session"]
    known = int(session.max()) + 1 if len(session) else 0
    labels = names[:known] if names else [str(number) for number in range(known)]
    return {
        "session_name": pa.DictionaryArray.from_arrays(pa.array(session.astype(np.int32)), pa.array(labels, pa.string())),
        "placed_at_s": pa.array(enqueued_s + calls["placed_s"]),
        "admitted_at_s": pa.array(enqueued_s + calls["admitted_s"]),
        "first_token_at_s": pa.array(enqueued_s + calls["ttft_s"]),
        "ended_at_s": pa.array(enqueued_s + calls["e2e_s"]),
        "ttft_local_s": pa.array(calls["ttft_s"] - calls["placed_s"]),
        **{column: pa.array((bits & flag) != 0) for column, flag in FLAG_COLUMNS.items()},
    }


def _empty(scalars: dict[str, Any]) -> RunRecord:
    scalars["models"], scalars["instances"] = tuple(scalars["models"]), tuple(scalars["instances"])
    scalars["session_parents"] = {int(child): parent for child, parent in scalars["session_parents"].items()}
    return RunRecord(**scalars)


def _fill(records: dict[int, RunRecord], name: str, table: Any) -> None:
    import pyarrow.compute as pc

    for record in records.values():
        if name == "hbm_samples":
            record.hbm_samples = hbm_columns()
        columns: Columns = getattr(record, name)
        rows = table.filter(pc.equal(table["seed"], record.seed))
        for row in zip(*(_codes(record, column, rows[column].to_pylist()) for column in columns.names), strict=True):
            columns.append(*row)
        if name == "calls":
            known = dict(zip(rows["session"].to_pylist(), rows["session_name"].to_pylist(), strict=True))
            record.session_names = [known.get(number, str(number)) for number in range(max(known, default=-1) + 1)]


def _codes(record: RunRecord, column: str, values: list[Any]) -> Iterable[Any]:
    names = _names(record, column)
    if names is None:
        return values
    code = {name: number for number, name in enumerate(names)} | {None: NOWHERE.get(column)}
    return [code[value] for value in values]
