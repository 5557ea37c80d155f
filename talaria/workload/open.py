"""One way to name a workload, for scenario files and the command line: a preset or a trace file, and what to change in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from talaria.errors import InputError, unknown_name
from talaria.workload import transform
from talaria.workload.generate import GeneratedWorkload
from talaria.workload.recipes import PRESETS, Recipe, resolve
from talaria.workload.session import Workload

CHANGES: dict[str, Callable[[Workload, Any], Workload]] = {
    "window_s": lambda workload, window: transform.within(workload, *_pair(window)),
    "only_models": lambda workload, models: transform.only_models(workload, _names(models)),
    "first_sessions": transform.first_sessions,
    "first_calls": transform.first_calls,
    "rate_scale": transform.scale_rate,
    "gap_scale": transform.scale_gaps,
    "gap_cap_s": transform.cap_gaps,
}
"""Changes by the name they have in a file, in the order in which they apply: a capped gap is capped after scaling."""


def open_workload(source: str | Mapping[str, Any], seed: int, *, where: str = "workload") -> Workload:
    """The workload that ``source`` names: a preset (drawn under ``seed``), the path of a ``talaria.trace/1`` file, or a
    mapping with ``preset`` or ``trace``, any of ``CHANGES`` and, for a preset, fields of its recipe.

    Raises InputError for an unknown name or key, a value out of bounds, and a trace header that cannot be read.
    """
    if isinstance(source, str):
        source = {_kind_of(source, where): source}
    settings = dict(source)
    preset, trace = settings.pop("preset", None), settings.pop("trace", None)
    if (preset is None) == (trace is None):
        raise InputError(
            "needs exactly one of 'preset' and 'trace'", where=where, allowed=f"preset: {', '.join(sorted(PRESETS))}; trace: FILE"
        )
    changes = {name: settings.pop(name) for name in CHANGES if name in settings}
    known = [*CHANGES] if preset is None else [*CHANGES, *Recipe.model_fields]
    for key in settings:
        if key not in known:
            raise unknown_name("setting", str(key), known, where=where)
    workload = _trace(str(trace)) if preset is None else GeneratedWorkload(str(preset), resolve(str(preset), settings, where=where), seed)
    for name, value in changes.items():
        try:
            workload = CHANGES[name](workload, value)
        except InputError as error:
            place = f"{where}: {error.where}" if error.where else where
            raise InputError(error.what, where=place, allowed=error.allowed, fix=error.fix) from None
    return workload


def _kind_of(source: str, where: str) -> str:
    if source in PRESETS:
        return "preset"
    if Path(source).exists() or source.endswith((".jsonl", ".gz")) or "/" in source:
        return "trace"
    raise unknown_name("workload preset or trace file", source, PRESETS, where=where)


def _trace(path: str) -> Workload:
    from talaria.workload.trace import TraceFile

    return TraceFile(path)


def _pair(value: object) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(item, int | float) for item in value):
        return value[0], value[1]
    raise InputError(f"window_s = {value!r}", allowed="[start, end] in seconds")


def _names(value: object) -> list[str]:
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        return list(value)
    raise InputError(f"only_models = {value!r}", allowed="a list of model names")
