"""What the options that several commands share look like and how their text becomes values, with errors that name the option."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from talaria.errors import InputError, unknown_name
from talaria.policy.knobs import BY_NAME, KnobError, parse_value

ScenarioOption = Annotated[str | None, typer.Option("--scenario", metavar="NAME|FILE", help="What is simulated: see `scenarios`.")]
TraceOption = Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Replay this trace instead of the scenario's workload.")]
MapOption = Annotated[list[str] | None, typer.Option("--map", metavar="SRC=DST", help="Run the trace's model SRC as the scenario's DST.")]
ArrivalsOption = Annotated[
    str | None,
    typer.Option(
        "--arrivals", metavar="KIND", help="How its sessions start: trace, closed_pool:N, staggered:S, poisson:RATE, all_at_once."
    ),
]
ConfigOption = Annotated[str | None, typer.Option("--config", metavar="NAME", help="Router and switches: see `configs`.")]
PolicyOption = Annotated[Path | None, typer.Option("--policy", metavar="FILE", help="A policy file: knobs, and optionally a config.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="Set a knob: see `knobs`.")]
SeedOption = Annotated[int | None, typer.Option("--seed", metavar="N", help="One seed.")]
SeedsOption = Annotated[str | None, typer.Option("--seeds", metavar="N|A:B", help="Seeds 0..N-1, or A..B-1.")]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write results to this directory.")]
DecisionsOption = Annotated[bool, typer.Option("--decisions", help="Also write decisions.jsonl (needs --out).")]
TimelineOption = Annotated[bool, typer.Option("--timeline", help="Also write timeline.json for Perfetto (needs --out).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]

MAX_SEEDS = 1_000_000
SEED_DIGITS = 18


def parse_assignments(texts: Iterable[str], option: str, form: str, example: str) -> dict[str, str]:
    """``a=b`` texts as a mapping. Raises InputError on a text without both sides and on a name given twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InputError(f"{text!r} has not both sides", where=option, allowed=form, fix=f"for example {option} {example}")
        if name in found:
            raise InputError(f"{name!r} is given twice: {found[name]!r} and {value!r}", where=option, allowed=f"each {form} once")
        found[name] = value
    return found


def parse_knobs(values: Mapping[str, Any], where: str) -> dict[str, object]:
    """Knob values by command-line name, parsed and checked. Raises InputError naming the knob, what is allowed, the nearest name."""
    return {name: parse_knob(name, value, where) for name, value in values.items()}


def parse_knob(name: str, value: object, where: str) -> object:
    """One knob's value, parsed and checked; ``where`` is the option or file that gave it."""
    try:
        return parse_value(name, value)
    except KnobError as error:
        if name not in BY_NAME:
            raise unknown_name("knob", name, BY_NAME, where=where) from None
        meaning = f"{name} is {BY_NAME[name].meaning}"
        raise InputError(f"{name}={value} is not allowed", where=where, allowed=error.allowed, fix=meaning) from None


def parse_seeds(seed: int | None, seeds: str | None, default: int) -> range:
    """``--seed N`` is N alone; ``--seeds N`` is 0..N−1 and ``A:B`` is A..B−1; neither is 0..default−1. Raises InputError."""
    if seed is not None and seeds is not None:
        raise InputError("given together with --seeds", where="--seed", allowed="one of --seed and --seeds")
    if seed is not None:
        if seed < 0:
            raise InputError(f"{seed} is negative", where="--seed", allowed="an integer from 0")
        return range(seed, seed + 1)
    if seeds is None:
        return range(default)
    first, colon, last = seeds.partition(":")
    low, high = (first, last) if colon else ("0", first)
    if not all(text.strip().isdecimal() and len(text) <= SEED_DIGITS for text in (low, high)):
        raise InputError(f"{seeds!r} is no number of seeds", where="--seeds", allowed="N (0..N-1) or A:B (A..B-1), integers from 0")
    found = range(int(low), int(high))
    if not 1 <= len(found) <= MAX_SEEDS:
        raise InputError(f"{seeds!r} means {len(found):,} seeds", where="--seeds", allowed=f"1 to {MAX_SEEDS:,} seeds")
    return found


def parse_names(text: str, known: Sequence[str], *, kind: str, where: str) -> tuple[str, ...]:
    """Comma-separated names from a registry. Raises InputError on an unknown, repeated or missing one."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for index, name in enumerate(names):
        if name not in known:
            raise unknown_name(kind, name, known, where=where)
        if name in names[:index]:
            raise InputError(f"{kind} {name!r} is given twice", where=where, allowed=f"each {kind} once")
    if not names:
        raise InputError(f"{text!r} names no {kind}", where=where, allowed=", ".join(known))
    return names


def check_files_wanted(out: Path | None, *, decisions: bool, timeline: bool) -> None:
    """Raises InputError if a file is asked for without a directory to put it in."""
    for wanted, option in ((decisions, "--decisions"), (timeline, "--timeline")):
        if wanted and out is None:
            raise InputError("needs a directory to write to", where=option, fix="add --out DIR")
