"""``report.html`` of a reproduction: the whole table and every figure in one self-contained file, and ``reproduce.json`` beside it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from talaria.report import figures as common
from talaria.report.document import Document, to_json
from talaria.report.html import Picture, picture
from talaria.reproduce import figures, table
from talaria.reproduce.experiments import CORPUS, REPLAY, Experiment, Findings
from talaria.sim.compare import MECHANISMS

CROSSES = "Crosses are published values."
ROUNDS_OF = ("talaria", "round-only")


def write(directory: Path, document: Document, found: Findings) -> None:
    """``reproduce.json``, a pure function of version and seeds, and the page in ``directory``. ``found`` kept what figures need."""
    (directory / "reproduce.json").write_text(to_json(document), encoding="utf-8")
    (directory / "report.html").write_text(render(document, found), encoding="utf-8")


def render(document: Document, found: Findings) -> str:
    """The page of a ``talaria.reproduce/1`` document and what its figures are drawn from."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = files("talaria.reproduce").joinpath("reproduce.html.j2").read_text(encoding="utf-8")
    places = {key: place for place, key in enumerate(document["notes"], 1)}
    groups = [
        (title, [_cells(row, places) for row in document["numbers"] if row["group"] == name]) for name, title in document["groups"].items()
    ]
    errors = [
        [row["of"], row["results"], row["undefined"], *(table.share_text(row[name]) for name in ("median", "mean", "worst"))]
        for row in document["errors"]
    ]
    return environment.from_string(template).render(
        document=document, places=places, groups=groups, errors=errors, holds=table.holds_text, pictures=_pictures(document, found)
    )


def _cells(row: Document, places: dict[str, int]) -> dict[str, str]:
    return {
        "name": row["name"],
        "published": table.published_text(row),
        "simulated": table.simulated_text(row),
        "error": table.error_text(row),
        "by": ", ".join(f"{key} {value}" for key, value in (row["by"] or {}).items() if key != "given"),
        "notes": " ".join(f"[{places[key]}]" for key in row["notes"]),
    }


def _marks(document: Document) -> figures.Marks:
    """The published results of runs, by experiment and metric."""
    marks = {}
    for row in document["numbers"]:
        by = row["by"] or {}
        if row["kind"] == "result" and "run" in by and row["unit"] != "ms":
            marks[Experiment(by["run"], by["config"], by.get("tau")), by["metric"]] = float(row["published"])
    return marks


def _regime_marks(document: Document) -> dict[str, dict[str, float]]:
    """The published percentiles of the regime, by quantity."""
    marks: dict[str, dict[str, float]] = {"depth": {}, "gap_s": {}, "prompt_tokens": {}}
    for row in document["numbers"]:
        quantity, _, percentile = row["name"].partition("/")
        if row["group"] == "regime" and percentile in ("p50", "p95", "max"):
            marks[quantity][percentile] = float(row["published"])
    return marks


def _pictures(document: Document, found: Findings) -> list[Picture]:
    marks, first_seed = _marks(document), found.seeds[0]
    pictures = [
        picture(
            "Regime",
            f"Calls a session, gaps and prompts of the generated corpus, all seeds pooled. {CROSSES} Its laws were fitted to them.",
            figures.regime(found.draws[CORPUS], _regime_marks(document)),
        ),
        picture(
            "Latency",
            f"Completion times of sessions and time to first token of all calls, five configurations, all seeds pooled. {CROSSES}",
            figures.latency(found, MECHANISMS, marks),
        ),
        picture(
            "Sessions",
            "Every session of every seed as a dot.",
            common.sct_by_configuration(figures.runs_of(found, REPLAY, MECHANISMS)),
        ),
        picture(
            "Session-prefill",
            "With SP off every waiting return is parked.",
            figures.session_prefill(found, MECHANISMS),
        ),
        picture(
            "Switches",
            "A logical switch lasts as long as its slowest rank and has the path of its worst one.",
            common.switch_latency(figures.runs_of(found, REPLAY, ("talaria", "h2d-only"))),
        ),
        picture("Rounds", "Where the rounds of a whole run went.", figures.rounds_together(found, ROUNDS_OF)),
    ]
    for config in ROUNDS_OF:
        caption = f"Rounds of {config} over time, seed {first_seed}. Bars stack to the mean round length of their stretch of time."
        pictures.append(picture(f"Rounds of {config}", caption, figures.rounds_over_time(found, config)))
    return [
        *pictures,
        picture(
            "Memory", f"One GPU under talaria, seed {first_seed}.", common.hbm_footprint(found.records[Experiment(REPLAY, "talaria")][0])
        ),
        picture("Placement", f"TTFT of all calls by router and load, all seeds pooled. {CROSSES}", figures.placement_ttft(found, marks)),
        picture("Opens", f"Avoidable cold opens by router and load, means over seeds. {CROSSES}", figures.placement_opens(found, marks)),
        picture("Lease timeout", f"What τ trades; bands are 95 % intervals. {CROSSES}", figures.tau_tradeoff(found, marks)),
    ]
