"""The validation of one simulation against one real run of the same trace: a document, a table of calls and a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, stdev
from typing import Any

from talaria.errors import InputError
from talaria.gpu.validation.joined import CallKey, Errors, Side, errors, side
from talaria.gpu.validation.terms import TermPair, pairs, summary
from talaria.report.document import Document, rounded, to_json
from talaria.report.files import StagedDirectory, read_run
from talaria.report.metrics import METRICS
from talaria.report.replay import Differences, replay

SCHEMA = "talaria.validation/1"
BAR_METRIC = "sct_p50_s"
BAR_SHARE = 0.15
"""The simulated median SCT is right within this share of the measured one, or within ``BAR_SPREADS`` times what repetitions of
the real run differ by (standard deviation), whichever is more."""
BAR_SPREADS = 2.0


@dataclass(frozen=True, slots=True)
class Validation:
    """``document`` is ``talaria.validation/1``; the rest is what a figure and a table of calls are made of."""

    document: Document
    simulated: Side
    measured: Side
    terms: list[TermPair]

    @property
    def passed(self) -> bool:
        return bool(self.document["passed"])


def validate(sim: Path, gpu: Path, on_decision: Callable[[], None] = lambda: None) -> Validation:
    """Compare two run directories. Raises InputError if one is unreadable, or the two are not runs of the same sessions."""
    (sim_document, sim_records), (gpu_document, gpu_records) = read_run(sim), read_run(gpu)
    log = gpu / "decisions.jsonl"
    if not log.exists():
        raise InputError("has no decisions.jsonl", where=str(gpu), allowed="a directory that `talaria-gpu run --out DIR` wrote")
    simulated, measured = side(sim_records), side(gpu_records)
    if not set(simulated.calls) & set(measured.calls):
        raise InputError("has no call of the other run", where=str(sim), fix="simulate the trace that was replayed: --trace FILE")
    terms = pairs(log, gpu_records[0], gpu_document["provenance"].get("began_s", [0.0])[0])
    metrics = [_metric_row(name, sim_document, gpu_document) for name in METRICS]
    bar = _bar(next(row for row in metrics if row["metric"] == BAR_METRIC))
    differences = replay(log, on_decision)
    document = {
        "schema": SCHEMA,
        "simulated": _identity(sim, sim_document),
        "measured": _identity(gpu, gpu_document),
        "metrics": metrics,
        "switches": _mix(metrics),
        "sessions": asdict(errors(simulated.sct_s, measured.sct_s)),
        "calls": {name: asdict(_call_errors(simulated, measured, name)) for name in ("ttft_s", "e2e_s")},
        "terms": {name: asdict(found) for name, found in summary(terms).items()},
        "decisions": {"count": differences.decisions, "differences": differences.count, "first": _shown(differences)},
        "bar": bar,
        "passed": bar["passed"] and differences.count == 0,
    }
    return Validation({key: rounded(value) for key, value in document.items()}, simulated, measured, terms)


def write(validation: Validation, out: Path) -> None:
    """``validation.json``, ``calls.parquet`` and ``validation.png`` in a new directory. Raises InputError if it cannot be written."""
    from talaria.gpu.validation.figure import draw
    from talaria.report.style import to_png

    with StagedDirectory(out) as directory:
        (directory.staging / "validation.json").write_text(to_json(validation.document), encoding="utf-8")
        _write_calls(validation, directory.staging / "calls.parquet")
        (directory.staging / "validation.png").write_bytes(to_png(draw(validation)))
        directory.commit()


def _identity(path: Path, document: Document) -> Document:
    return {"directory": str(path), **{name: document[name] for name in ("scenario", "config", "seeds", "provenance")}}


def _metric_row(name: str, sim: Document, gpu: Document) -> Document:
    """Medians over repetitions, their difference, and how far the real repetitions are from each other."""
    values = {which: [run[name] for run in document["per_seed"] if run.get(name) is not None] for which, document in
              (("simulated", sim), ("measured", gpu))}  # fmt: skip
    row: Document = {"metric": name, **{which: median(found) if found else None for which, found in values.items()}}
    row["spread"] = stdev(values["measured"]) if len(values["measured"]) > 1 else None
    both = row["simulated"] is not None and row["measured"] is not None
    row["error"] = row["simulated"] - row["measured"] if both else None
    row["error_share"] = row["error"] / row["measured"] if both and row["measured"] else None
    return row


def _mix(metrics: list[Document]) -> Document | None:
    """Shares of switches by path, and half the sum of their differences; None where a run has no switches."""
    rows = {row["metric"].removeprefix("path_"): row for row in metrics if row["metric"].startswith("path_")}
    if any(row["error"] is None for row in rows.values()):
        return None
    shares = {which: {path: row[which] for path, row in rows.items()} for which in ("simulated", "measured")}
    return {**shares, "difference": sum(abs(row["error"]) for row in rows.values()) / 2}


def _bar(row: Mapping[str, Any]) -> Document:
    allowed_s = max(BAR_SHARE * (row["measured"] or 0.0), BAR_SPREADS * (row["spread"] or 0.0))
    return {
        "metric": BAR_METRIC, "allowed_error": allowed_s, "error": row["error"],
        "passed": row["error"] is not None and abs(row["error"]) <= allowed_s,
    }  # fmt: skip


def _call_errors(simulated: Side, measured: Side, name: str) -> Errors:
    left, right = ({key: getattr(times, name) for key, times in one.calls.items()} for one in (simulated, measured))
    return errors(left, right)


def _shown(differences: Differences) -> list[Document]:
    return [asdict(difference) for difference in differences.first]


def _write_calls(validation: Validation, path: Path) -> None:
    """One row per call of either run; terms where the log explains the call's placement."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    terms = {pair.key: pair for pair in validation.terms}
    rows = [_call_row(key, validation, terms.get(key)) for key in sorted({*validation.simulated.calls, *validation.measured.calls})]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")


def _call_row(key: CallKey, validation: Validation, pair: TermPair | None) -> Document:
    row: Document = key._asdict()
    for which in ("simulated", "measured"):
        times = getattr(validation, which).calls.get(key)
        for name in ("placed_s", "admitted_s", "ttft_s", "e2e_s"):
            row[f"{which}_{name}"] = getattr(times, name) if times else math.nan
    for which in ("predicted", "happened"):
        for name in ("request", "kv", "activate"):
            row[f"{which}_{name}_s"] = getattr(getattr(pair, which), name) if pair else math.nan
    row["worst_term"] = pair.worst if pair else None
    return row
