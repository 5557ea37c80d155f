"""``report.html`` of a study: one self-contained page, without scripts or requests."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from talaria.policy.knobs import BY_NAME, value_text
from talaria.report.document import Document
from talaria.report.html import picture
from talaria.report.metrics import METRICS
from talaria.report.tables import number
from talaria.tune.report import BASELINE, baseline, change, remarks, results_by_scenario


def render(document: Document, pictures: Sequence[tuple[str, str, Any]]) -> str:
    """The page of a ``talaria.tune/1`` document and its figures."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = files("talaria.tune").joinpath("report.html.j2").read_text(encoding="utf-8")
    checked = document["validation"]
    return environment.from_string(template).render(
        document=document,
        remarks=remarks(document)[:-1],
        baseline=BASELINE,
        knobs=[_knob_row(name, document) for name in document["best"]["knobs"]],
        results=[_result_row(*row) for row in results_by_scenario(checked)],
        seen=[_result_row(name, "all", entry) for name, entry in document["tuning"].items()],
        front=[_front_row(entry) for entry in document["front"]],
        definitions={name: METRICS[name].doc for name in checked["objectives"] if name in METRICS},
        pictures=[picture(*item) for item in pictures],
        details=[*_flat(document["task"]), ("storage", document["storage"]), ("version", document["provenance"]["version"])],
    )


def _knob_row(name: str, document: Document) -> dict[str, str]:
    knob, weight = BY_NAME.get(name), (document["importance"] or {}).get(name)
    return {
        "name": name,
        "baseline": baseline(document["baseline"], name),
        "tuned": value_text(document["best"]["knobs"][name]),
        "unit": knob.unit if knob else "",
        "importance": "–" if weight is None else f"{weight:.2f}",
        "meaning": knob.meaning if knob else "instances of the scenario, its groups in turn",
    }


def _result_row(name: str, scenario: str, entry: Document) -> dict[str, str]:
    return {
        "scenario": scenario, "name": name, "baseline": number(entry["baseline"]), "tuned": number(entry["tuned"]), "change": change(entry),
        "verdict": entry["verdict"],
    }  # fmt: skip


def _front_row(entry: Document) -> dict[str, str]:
    return {
        "trial": str(entry["trial"]),
        "knobs": ", ".join(f"{name} {value_text(value)}" for name, value in entry["knobs"].items()),
        "values": ", ".join(f"{name} {number(value)}" for name, value in entry["values"].items()),
    }


def _flat(mapping: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in mapping.items():
        if isinstance(value, dict):
            rows.extend(_flat(value, f"{prefix}{key} · "))
        elif value not in (None, []):
            rows.append((f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return rows
