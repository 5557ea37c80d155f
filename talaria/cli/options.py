"""What the options that several commands share look like and how their text becomes values, with errors that name the option."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from talaria.errors import InputError, unknown_name
from talaria.policy.knobs import BY_NAME, KnobError, parse_value

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


@dataclass(frozen=True, slots=True)
class Options:
    """The options that run, compare and sweep share, as they came. Added to a command by ``shared_options``."""

    scenario: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="What is simulated: see `scenarios`.")] = None
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Replay this trace instead of the scenario's workload.")] = None
    map: Annotated[list[str] | None, typer.Option(metavar="SRC=DST", help="Run the trace's model SRC as the scenario's DST.")] = None
    arrivals: Annotated[
        str | None, typer.Option(metavar="KIND", help="How the trace's sessions start: trace, closed_pool:5, poisson:0.2, all_at_once ...")
    ] = None
    config: Annotated[str | None, typer.Option(metavar="NAME", help="Router and switches: see `configs`.")] = None
    policy: Annotated[Path | None, typer.Option(metavar="FILE", help="A policy file: knobs, and optionally a config.")] = None
    set: Annotated[list[str] | None, typer.Option(metavar="KNOB=VALUE", help="Set a knob: see `knobs`.")] = None
    seed: Annotated[str | None, typer.Option(metavar="N", help="One seed.")] = None
    seeds: Annotated[str | None, typer.Option(metavar="N|A:B", help="Seeds 0..N-1, or A..B-1.")] = None
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the results to this directory.")] = None
    decisions: Annotated[bool, typer.Option("--decisions", help="Also write decisions.jsonl of the first seed (with --out).")] = False
    timeline: Annotated[bool, typer.Option("--timeline", help="Also write timeline.json, of the first seed, for Perfetto.")] = False
    json: JsonOption = False


def shared_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives ``command(options, ...)`` one command-line option per field of ``Options`` in place of its first parameter, except
    those in ``without``, which keep their defaults."""
    hints = get_type_hints(Options, include_extras=True)
    shared = [
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name])
        for item in fields(Options)
        if item.name not in without
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @wraps(command)
        def with_options(**given: Any) -> None:
            options = Options(**{item.name: given.pop(item.name) for item in shared})
            command(options, **given)

        parameters = [*(item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own), *shared]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {item.name: item.annotation for item in parameters}
        return with_options

    return decorate


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


def parse_seeds(seed: str | None, seeds: str | None, default: int, *, where: str = "--seeds") -> range:
    """``--seed N`` is N alone; ``--seeds N`` is 0..N−1 and ``A:B`` is A..B−1; neither is 0..default−1. Raises InputError.

    ``where``: the option that gave ``seeds``.
    """
    if seed is not None and seeds is not None:
        raise InputError("given together with --seeds", where="--seed", allowed="one of --seed and --seeds")
    if seed is not None:
        if not _is_seed(seed):
            raise InputError(f"{seed!r} is no seed", where="--seed", allowed="an integer from 0")
        return range(int(seed), int(seed) + 1)
    if seeds is None:
        return range(default)
    first, colon, last = seeds.partition(":")
    low, high = (first, last) if colon else ("0", first)
    if not (_is_seed(low) and _is_seed(high)):
        raise InputError(f"{seeds!r} is no number of seeds", where=where, allowed="N (0..N-1) or A:B (A..B-1), integers from 0")
    found = range(int(low), int(high))
    if not 1 <= len(found) <= MAX_SEEDS:
        raise InputError(f"{seeds!r} means {len(found):,} seeds", where=where, allowed=f"1 to {MAX_SEEDS:,} seeds")
    return found


def _is_seed(text: str) -> bool:
    return text.strip().isdecimal() and len(text) <= SEED_DIGITS


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
