"""``report.html``: one self-contained page per run, without scripts or requests. What it shows comes from the run directory.

The page is a pure function of the document and the records, so rebuilding it gives the same bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from talaria.policy.knobs import BY_NAME, value_text
from talaria.report import figures
from talaria.report.document import Document
from talaria.report.metrics import METRICS
from talaria.report.record import RunRecord
from talaria.report.style import to_svg
from talaria.report.tables import GROUPS, number, with_margin

HEADLINES = {
    "sct_p50_s": "session completion, p50",
    "sct_p95_s": "session completion, p95",
    "ttft_p50_s": "time to first token, p50",
    "return_ttft_p50_s": "… of returns, p50",
    "residency_hit": "residency hit",
    "switch_share": "share of rounds spent switching",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure of the page: what it shows, how to read it, and its image as a data URI."""

    title: str
    caption: str
    source: str


def render(document: Document, records: Sequence[RunRecord]) -> str:
    """The page of a ``talaria.run/1`` document and its records, one per seed."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = files("talaria.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        document=document,
        headlines=[_headline(document, name, label) for name, label in HEADLINES.items()],
        groups={group: [_metric_row(document, name) for name in names] for group, names in GROUPS.items()},
        pictures=_pictures(document, records),
        knobs=[_knob_row(name, document["policy"][name]) for name in _registry_order(document["policy"])],
        details={"Workload": _flat(document["trace"]), "Provenance": _flat(document["provenance"])},
    )


def _headline(document: Document, name: str, label: str) -> dict[str, str]:
    return {"label": label, "value": number(document["metrics"][name]), "unit": METRICS[name].unit, "name": name}


def _metric_row(document: Document, name: str) -> dict[str, str]:
    metric = METRICS[name]
    value = with_margin(document["metrics"][name], document["spread"][name]["ci95"])
    better = {"lower": "↓", "higher": "↑", None: ""}[metric.better]
    return {"name": name, "value": value, "unit": metric.unit, "better": better, "doc": metric.doc}


def _knob_row(name: str, value: Any) -> dict[str, str]:
    shown = value_text(value)
    knob = BY_NAME.get(name)
    if knob is None:
        return {"name": name, "value": shown, "unit": "", "meaning": "", "source": ""}
    return {"name": name, "value": shown, "unit": knob.unit, "meaning": knob.meaning, "source": knob.source}


def _registry_order(policy: Collection[str]) -> list[str]:
    return [name for name in BY_NAME if name in policy] + sorted(set(policy) - set(BY_NAME))


def _pictures(document: Document, records: Sequence[RunRecord]) -> list[Picture]:
    """The figures that this run has data for. Distributions pool all seeds; courses over time show the first."""
    if not records:
        return []
    runs, first = {document["config"]: records}, records[0]
    shown = f"seed {first.seed}" if len(records) > 1 else "this run"
    pictures = [
        picture(
            "Latency",
            "Left: completion times of sessions whose calls all completed. Right: time to first token from the intended enqueue, so "
            "every admission delay counts.",
            figures.latency_cdfs(runs),
        )
    ]
    if len(first.rounds):
        caption = f"Where the cold instances' rounds of {shown} went. Bars stack to the mean round length of their stretch of time."
        pictures.append(picture("Rounds", caption, figures.round_composition(first, _round_bound_s(document))))
    if any(len(record.switches) for record in records):
        caption = "A logical switch lasts as long as its slowest rank and has the path of its worst one. Opens are left out."
        pictures.append(picture("Switches", caption, figures.switch_latency(runs)))
    if first.hbm_samples is not None and len(first.hbm_samples):
        caption = (
            f"What {shown} kept in memory, on the instance where that grew largest. Reserved: the managed buffer, whatever it holds, "
            "and the residue of opened models; the most of any instance."
        )
        pictures.append(picture("Memory", caption, figures.hbm_footprint(first)))
    return pictures


def picture(title: str, caption: str, figure: Any) -> Picture:
    """A matplotlib figure as a picture of a page."""
    encoded = base64.b64encode(to_svg(figure).encode()).decode()
    return Picture(title, caption, f"data:image/svg+xml;base64,{encoded}")


def _round_bound_s(document: Document) -> float | None:
    """γ·T_TTFT of the run's policy (SPEC §4.4)."""
    policy = document["policy"]
    return policy["gamma"] * policy["t_ttft"] if {"gamma", "t_ttft"} <= set(policy) else None


def _flat(mapping: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in sorted(mapping.items()):
        if isinstance(value, dict):
            rows.extend(_flat(value, f"{prefix}{key} · "))
        else:
            text = ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
            rows.append((f"{prefix}{key}", text))
    return rows
