"""Tables for the terminal, made for 100 columns: one run, a comparison of up to seven, a sweep. They read documents, never records.

So what is on screen is what ``--json`` prints and ``run.json`` holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from talaria.policy.knobs import value_text
from talaria.report.document import Document

GROUPS: dict[str, tuple[str, ...]] = {
    "sessions and calls": (
        "sct_p50_s", "sct_p95_s", "sct_mean_s", "ttft_p50_s", "ttft_p95_s", "return_ttft_p50_s", "return_ttft_p95_s", "tpot_p50_s",
        "sessions_completed", "calls_completed", "calls_shed", "calls_failed", "makespan_s",
    ),
    "placement and prefixes": (
        "same_instance_return", "residency_hit", "lease_hit", "unused_lease", "model_opens", "avoidable_opens", "kv_device", "kv_host",
        "kv_missing", "restore_skips", "host_capacity_misses",
    ),
    "rounds and switches": (
        "rounds", "round_wall_s", "active_s", "switch_s", "switch_share", "switches", "switch_p50_s", "switch_mean_s", "switch_p95_s",
        "path_d2d", "path_partial", "path_h2d",
    ),
    "session-prefill and safety": (
        "sp_admitted", "sp_parked", "sp_admission_rate", "events_per_round_admitted", "events_per_round_deferred", "deadline_risk",
        "max_wait_rounds", "peak_hbm_gib", "events",
    ),
}  # fmt: skip
"""Every metric once, in the order in which a reader asks."""

COMPARED = (
    "sct_p50_s", "sct_p95_s", "ttft_p50_s", "ttft_p95_s", "return_ttft_p50_s", "rounds", "switch_s", "switch_p50_s", "sp_admission_rate",
    "same_instance_return", "residency_hit", "kv_missing", "calls_shed",
)  # fmt: skip
SWEPT = ("same_instance_return", "residency_hit", "model_opens", "unused_lease", "return_ttft_p50_s", "return_ttft_p95_s", "sct_p50_s")
HEADINGS = {
    "same_instance_return": "same\ninstance",
    "residency_hit": "residency\nhit",
    "model_opens": "opens",
    "unused_lease": "unused\nlease",
    "return_ttft_p50_s": "return TTFT\np50, s",
    "return_ttft_p95_s": "return TTFT\np95, s",
    "sct_p50_s": "SCT\np50, s",
}


def number(value: float | None) -> str:
    """A metric as a reader wants it: whole numbers whole, else four significant digits, "–" where undefined."""
    if value is None:
        return "–"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def with_margin(mean: float | None, interval: Sequence[float | None]) -> str:
    """``mean±half width`` of the 95 % interval, both to the margin's second digit; without it where the seeds agree."""
    high = interval[1]
    if mean is None or high is None or not high > mean:
        return number(mean)
    margin = high - mean
    decimals = max(0, 1 - math.floor(math.log10(margin)))
    return f"{mean:,.{decimals}f}±{margin:,.{decimals}f}"


def run_table(document: Document) -> Any:
    """All metrics of ``talaria.run/1`` in groups, with 95 % margins where there are several seeds; a rich renderable."""
    table = _table()
    for heading, justify in (("metric", "left"), ("value", "right")) * 2:
        table.add_column(heading, justify=justify, no_wrap=True)
    halves = list(GROUPS.items())
    for left, right in zip(halves[::2], halves[1::2], strict=True):
        table.add_row(f"[bold]{left[0]}[/]", "", f"[bold]{right[0]}[/]", "")
        for index in range(max(len(left[1]), len(right[1]))):
            cells = [_metric_cells(document, names[index]) if index < len(names) else ("", "") for _, names in (left, right)]
            table.add_row(*cells[0], *cells[1])
        table.add_section()
    return _titled(f"{document['scenario']} · {document['config']} · {_seeds(document['seeds'])}", table)


def compare_table(document: Document) -> Any:
    """``talaria.compare/1``: one column per configuration; below its mean, the paired difference from the first one.

    The last row counts the sessions that end sooner under the first configuration than under each other one. Where the terminal is too
    narrow for a difference and its margin beside each other, the margin goes below; then names break at their hyphens.
    """
    configs: dict[str, Document] = document["configs"]
    base, first = next(iter(configs.items()))
    title = f"{first['scenario']} · {_seeds(first['seeds'])} · second line: difference from {base}, 95 % interval"
    tables = [_comparison(document, "±"), _comparison(document, "\n±"), _comparison(document, "\n±", tight=True)]
    return _titled(title, _FirstThatFits(tables))


def _comparison(document: Document, margin: str, *, tight: bool = False) -> Any:
    configs: dict[str, Document] = document["configs"]
    base, *others = configs
    first = configs[base]
    table = _table(padding=0 if tight else 1)
    table.add_column("metric", no_wrap=True)
    for name in configs:
        table.add_column(name.replace("-", "-\n") if tight else name, justify="right", no_wrap=tight)
    # The document's differences are a − b with the earlier configuration as a; a reader wants "this minus the base".
    paired = {(entry["b"], entry["metric"]): entry for entry in document["paired"] if entry["a"] == base}
    for metric in COMPARED:
        cells = [number(first["metrics"][metric])]
        for name in others:
            entry = paired[name, metric]
            low, high = entry["ci95"]
            change = _negated(entry["diff"]), [_negated(high), _negated(low)]
            cells.append(f"{number(configs[name]['metrics'][metric])}\n[dim]{_signed(*change).replace('±', margin)}[/]")
        table.add_row(metric, *cells)
    improved = [paired[name, "sessions_improved"] for name in others]
    counts = (with_margin(entry["diff"], entry["ci95"]).replace("±", margin) for entry in improved)
    table.add_row("sessions_improved", f"by {base}", *counts)
    return table


def sweep_table(document: Document) -> Any:
    """``talaria.sweep/1``: one row per value; below each mean the half width of its 95 % interval. Fits 80 columns."""
    table = _table()
    for knob in document["knob"].split(","):
        table.add_column(knob, justify="right", no_wrap=True)
    for metric in SWEPT:
        table.add_column(HEADINGS[metric], justify="right")
    for point in document["points"]:
        values = point["value"] if isinstance(point["value"], list) else [point["value"]]
        cells = [_two_lines(with_margin(point["metrics"][metric], point["spread"][metric]["ci95"])) for metric in SWEPT]
        table.add_row(*map(value_text, values), *cells)
    title = f"{document['scenario']} · {document['config']} · {_seeds(document['seeds'])} · second line: 95 % over seeds"
    return _titled(title, table)


def _table(padding: int = 1) -> Any:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, padding))


class _FirstThatFits:
    """The first of ``tables`` that the console can show without cutting cells, or the last."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self._tables = tables

    def __rich_console__(self, console: Any, options: Any) -> Any:
        unbounded = options.update(max_width=10 * options.max_width)
        fitting = (table for table in self._tables if console.measure(table, options=unbounded).maximum <= options.max_width)
        yield next(fitting, self._tables[-1])


def _titled(title: str, table: Any) -> Any:
    """``table`` below ``title``, which as rich's own title would be folded to the width of a narrow table."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), table)


def _metric_cells(document: Document, name: str) -> tuple[str, str]:
    return name, with_margin(document["metrics"][name], document["spread"][name]["ci95"])


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"


def _negated(value: float | None) -> float | None:
    return None if value is None else -value + 0.0


def _two_lines(text: str) -> str:
    mean, sign, margin = text.partition("±")
    return f"{mean}\n[dim]{sign}{margin}[/]" if sign else mean


def _signed(mean: float | None, interval: Sequence[float | None]) -> str:
    text = with_margin(mean, interval)
    return f"+{text}" if mean is not None and mean > 0 else text
