"""The reproduction as text for the terminal: every number, what they come to, and the notes; made for 100 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from talaria.report.document import Document
from talaria.report.tables import number, with_margin

Justify = Literal["left", "right"]
COLUMNS: tuple[tuple[str, Justify], ...] = (
    ("number", "left"), ("published", "right"), ("simulated", "right"), ("error", "right"), ("note", "left"),
)  # fmt: skip
WIDTHS = (36, 18, 18, 11, 7)
MISSED = "no"


def reproduce_table(document: Document) -> Any:
    """``talaria.reproduce/1`` on one page; a rich renderable."""
    from rich.console import Group
    from rich.text import Text

    seeds = document["seeds"]
    means = f"means over {len(seeds)} seeds, ± half of the 95 % interval" if len(seeds) > 1 else f"seed {seeds[0]}"
    title = f"published ({document['source']}) beside simulated: {means}"
    places = {key: place for place, key in enumerate(document["notes"], 1)}
    notes = [Text(f"[{place}] {document['notes'][key]}") for key, place in places.items()]
    return Group(
        Text(title, style="bold"), *_numbers(document, places), *notes,
        Text("\nabsolute relative error of the results", style="bold"), _errors(document), Text("bars", style="bold"), _checks(document),
    )  # fmt: skip


def published_text(row: Document) -> str:
    """The published value with its unit."""
    value = row["published"]
    text = ", ".join(map(str, value)) if isinstance(value, list) else number(float(value))
    return f"{text} {row['unit']}".strip()


def simulated_text(row: Document) -> str:
    """The simulated mean with its margin; what is not predicted is said."""
    value = row["simulated"]
    if row["kind"] == "sample":
        return "not predicted"
    if isinstance(value, list):
        return "the same" if value == row["published"] else ", ".join(map(str, value))
    if value is None:
        return "never happened"
    return with_margin(float(value), row["ci95"])


def error_text(row: Document) -> str:
    """The signed relative error, the difference where nothing relative exists, or what kind of number it is."""
    if row["kind"] != "result":
        return {"setting": "input", "sample": "sample size"}[row["kind"]]
    if row["error"] is not None:
        return f"{row['error']:+.0%}" if abs(row["error"]) >= 0.0095 else f"{row['error']:+.1%}"
    return "–" if row["simulated"] is None else f"{row['simulated'] - row['published']:+.2g} abs."


def share_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def holds_text(check: Document) -> str:
    return {True: "yes", False: MISSED, None: ""}[check["holds"]]


def _table() -> Any:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))


def _numbers(document: Document, places: dict[str, int]) -> Iterator[Any]:
    """One table a group, all with the same columns."""
    from rich.text import Text

    for name, title in document["groups"].items():
        yield Text(f"\n{title}", style="bold")
        table = _table()
        for (heading, justify), width in zip(COLUMNS, WIDTHS, strict=True):
            table.add_column(heading, justify=justify, width=width, overflow="fold")
        for row in document["numbers"]:
            if row["group"] == name:
                notes = "".join(f"\\[{places[key]}]" for key in row["notes"])
                table.add_row(row["name"], published_text(row), simulated_text(row), error_text(row), notes)
        yield table


def _errors(document: Document) -> Any:
    table = _table()
    table.add_column("of")
    for heading in ("results", "undefined", "median", "mean", "worst"):
        table.add_column(heading, justify="right")
    for row in document["errors"]:
        shares = [share_text(row[name]) for name in ("median", "mean", "worst")]
        table.add_row(row["of"], str(row["results"]), str(row["undefined"]), *shares)
    return table


def _checks(document: Document) -> Any:
    table = _table()
    for heading in ("what", "bar", "published", "found", "holds"):
        table.add_column(heading, overflow="fold")
    for check in document["checks"]:
        held = f"[bold]{MISSED}[/]" if check["holds"] is False else holds_text(check)
        table.add_row(check["name"], check["bar"], check["published"], check["found"], held)
    return table
