"""From measurements to files: a profile in which every number says where it is from, and a scenario that simulates the cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np

from talaria.errors import InputError
from talaria.gpu.config import ClusterConfig
from talaria.gpu.modelfiles import ModelFiles
from talaria.gpu.profiling.measure import Measured, ModelMeasured, Restored
from talaria.gpu.protocol import records
from talaria.profiles.fit import DECODE, PREFILL, fit_profile
from talaria.profiles.load import load
from talaria.profiles.points import ModelPoints, PointsFile
from talaria.profiles.schema import ProfileFile

CURVES = {"prefill": PREFILL, "decode": DECODE}
MIB = 2**20
RUNTIME_BYTES = 64 * MIB
OUTPUT_TOKENS_PRIOR = 256.0
LEAST_SHARE = 0.1
MOST_CV = 0.5
"""A repetition that was disturbed says nothing about the engine."""
POOR_MEDIAN, POOR_LARGEST = 0.15, 0.5
"""Relative errors of a fit, in the median and at its worst point, beyond which a simulation on it must not be trusted."""


def points(
    measured: Measured, cluster: ClusterConfig, files: dict[str, ModelFiles], *, name: str, source: str, open_s: float | None,
    gpu: str | None, hbm_bytes: int | None, base: str | None,
) -> PointsFile:  # fmt: skip
    """``source`` says when and on what, ``gpu`` is needed without ``base``. ``open_s``: of one model, None where nobody saw it start.

    Raises InputError.
    """
    tp = common_tp(cluster)
    models = {
        model: _model_points(found, files[model], cluster, model, tp, source, open_s, base) for model, found in measured.models.items()
    }
    for model, nbytes in _moved(measured).items():
        models[model].numbers["weight_bytes"] = _quantity(nbytes, f"what a rank has in its arena, {source}")
    return PointsFile(
        schema="talaria.points/1", name=name, description=f"Measured on the cluster {cluster.name} by talaria-gpu profile.", source=source,
        base=base, gpu=gpu, hardware=_hardware(measured, cluster, files, tp, source, hbm_bytes, base),
        models=models,
    )  # fmt: skip


def _moved(measured: Measured) -> dict[str, int]:
    """Bytes of each model's weights on a rank, as switches in an arena moved them: with buffers, and as the engine has processed them."""
    return {row.target: row.d2d_bytes + row.h2d_bytes for row in measured.staged}


def common_tp(cluster: ClusterConfig) -> int:
    """A profile is of one group size. Raises InputError where the instances differ in it."""
    first, *others = sorted({instance.tp for instance in cluster.instances})
    if others:
        found = ", ".join(map(str, (first, *others)))
        raise InputError(f"tp {found}", where="instances", allowed="one tp in a profile", fix="profile a cluster file for each")
    return first


def profile(points: PointsFile, measured: Measured) -> ProfileFile:
    """The fits of ``points``. Raises InputError if they do not determine a curve."""
    return _marked(_with_a_floor(fit_profile(points, where="talaria-gpu profile")[0], measured), measured)


def poor_fits(file: ProfileFile, models: Iterable[str]) -> dict[tuple[str, str], str]:
    """By model and curve: what is wrong with a fit whose errors are beyond the limits."""
    return {
        (model, curve): f"poor fit: median error {fit.median_error:.0%} (limit {POOR_MEDIAN:.0%}), "
        f"largest {fit.max_error:.0%} at {fit.worst} (limit {POOR_LARGEST:.0%})"
        for model in models
        for curve, fit in file.fits.get(model, {}).items()
        if fit.median_error > POOR_MEDIAN or fit.max_error > POOR_LARGEST
    }


def _marked(file: ProfileFile, measured: Measured) -> ProfileFile:
    """The sources of poorly fitted numbers, and the profile's description, say so."""
    document, poor = file.document(), poor_fits(file, measured.models)
    for (model, curve), why in poor.items():
        for name in CURVES[curve]:
            document["models"][model][name]["source"] += f"; {why}"
    if poor:
        document["description"] += " Poor fits: " + ", ".join(f"{model} {curve}" for model, curve in poor) + "."
    return ProfileFile.model_validate(document)


def _with_a_floor(file: ProfileFile, measured: Measured) -> ProfileFile:
    """No decode step costs nothing, whatever a fit to disturbed points says: policies divide by it."""
    document = file.document()
    for model, found in measured.models.items():
        base, least_s = document["models"][model]["decode_base_s"], LEAST_SHARE * min(point.ms for point in found.decode) / 1e3
        if base["value"] < least_s:
            base |= {"value": float(f"{least_s:.6g}"), "source": f"{LEAST_SHARE:.0%} of the shortest step seen, above the {base['source']}"}
    return ProfileFile.model_validate(document)


def _quantity(value: Any, source: str, provenance: str = "measured") -> dict[str, Any]:
    return {"value": value, "provenance": provenance, "source": source}


def _model_points(
    found: ModelMeasured, files: ModelFiles, cluster: ClusterConfig, model: str, tp: int, source: str, open_s: float | None,
    base: str | None,
) -> ModelPoints:  # fmt: skip
    read = f"config.json and weights of {files.name}"
    numbers: dict[str, Any] = {
        "hub_id": files.name,
        "family": cluster.models[model].family,
        "tp": _quantity(tp, "the cluster file"),
        "layers": _quantity(files.layers, read),
        "weight_bytes": _quantity(max(1, files.weight_bytes // tp), read),
        "kv_bytes_per_token": _quantity(_kv_per_rank(files, tp), read),
        "context_limit_tokens": _quantity(found.context_tokens, "the engine"),
        "output_tokens_prior": _quantity(OUTPUT_TOKENS_PRIOR, "before any answer was seen", "assumed"),
        "open_s": _quantity(round(open_s, 3), f"start of the engines, {source}") if open_s else _quantity(60.0, "not measured", "assumed"),
    }
    numbers |= _state(cluster, model, base)
    return ModelPoints(prefill=tuple(found.prefill), decode=tuple(found.decode), numbers=numbers)


def _state(cluster: ClusterConfig, model: str, base: str | None) -> dict[str, Any]:
    """Of a recurrent model: no engine says it, so what ``base`` knows stands, and without it a placeholder that says it is one."""
    if cluster.models[model].family != "recurrent":
        return {}
    known = None if base is None else load(base).file.models.get(model)
    if known is not None and known.family == "recurrent":
        return {}
    size = "unknown, a placeholder: counts only where state is restored from the host"
    spacing = "unknown, a placeholder: state is kept at every page"
    return {"state_bytes": _quantity(1, size, "assumed"), "checkpoint_tokens": _quantity(1, spacing, "assumed")}


def _kv_per_rank(files: ModelFiles, tp: int) -> int:
    return max(1, int(files.kv_bytes_on_rank(tp)))


def _hardware(
    measured: Measured, cluster: ClusterConfig, files: dict[str, ModelFiles], tp: int, source: str, hbm_bytes: int | None, base: str | None
) -> dict[str, Any]:
    """Everything without a base; over a base only what was measured."""
    found = {"tp": _quantity(tp, "the cluster file"), "page_tokens": _quantity(cluster.engine.page_tokens, "the cluster file")}
    found |= _switching(measured, files, tp, source)
    if chunks := {item.arena.chunk_bytes for item in cluster.instances if item.arena is not None}:
        found["chunk_bytes"] = _quantity(max(chunks), "the cluster file")
    if measured.overheads_s:
        text = f"median of {len(measured.overheads_s)} calls alone: the client's time to first token less prefill, {source}"
        found["call_overhead_s"] = _quantity(float(f"{median(measured.overheads_s):.4g}"), text)
    for field, ratios in (("prefill_cv", "prefill_ratios"), ("decode_cv", "decode_ratios")):
        spread = [ratio for model in measured.models.values() for ratio in getattr(model, ratios)]
        found[field] = _quantity(_cv(spread), f"repetitions, {source}")
    return found if base is not None else {**_assumed(measured, files, tp, hbm_bytes), **found}


def _switching(measured: Measured, files: dict[str, ModelFiles], tp: int, source: str) -> dict[str, Any]:
    """The phases of SPEC §5.4 with nothing staged: the second moves the weights, the others are fixed. Nothing where none was seen."""
    rows = [row for row in measured.switches if row.source is not None]
    if not rows:
        return {}
    text = f"{len(rows)} switches, {source}"
    phases = [median(row.phases_s[index] for row in rows) for index in range(5)]
    known = _moved(measured)
    moved = fmean(known.get(row.target, files[row.target].weight_bytes / tp) for row in rows)
    rate = moved / max(phases[1], 1e-6)
    names = ("save_phase_s", "shell_phase_s", "backend_phase_s", "publish_phase_s")
    fixed = {name: _quantity(round(seconds, 6), text) for name, seconds in zip(names, (phases[0], *phases[2:]), strict=True)}
    middle = {target: median(sum(row.phases_s) for row in rows if row.target == target) for target in {row.target for row in rows}}
    totals = [sum(row.phases_s) / max(middle[row.target], 1e-9) for row in rows]
    return {
        **fixed, "h2d_bytes_per_s": _quantity(rate, text), "d2d_bytes_per_s": _quantity(2.0 * rate, "nothing is staged", "assumed"),
        "d2h_bytes_per_s": _quantity(rate, "as h2d", "assumed"), "staging_bytes_per_s": _quantity(rate, "nothing is staged", "assumed"),
        "restore_bytes_per_s": _quantity(rate, "nothing is restored", "assumed"), "switch_cv": _quantity(_cv(totals), text),
        **_staging(measured.staged, phases[0], source), **_restoring(measured.restored, files, tp, source),
    }  # fmt: skip


def _staging(rows: list[records.SwitchRow], save_s: float, source: str) -> dict[str, Any]:
    """Of switches with one model staged beside another; nothing where none was. ``save_s``: phase 1 with nothing staged."""
    paths = Counter(row.path for row in rows)
    text = f"{len(rows)} switches ({', '.join(f'{count} {path}' for path, count in sorted(paths.items()))}), {source}"
    found: dict[str, Any] = {}
    if rates := [row.staging_bytes_per_s for row in rows if row.staging_bytes_per_s]:
        found["staging_bytes_per_s"] = _quantity(float(f"{median(rates):.4g}"), text)
        found["stager_phase_s"] = _quantity(round(max(0.0, median(row.phases_s[0] for row in rows) - save_s), 6), text)
    if gathers := [row.d2d_bytes / max(row.phases_s[1], 1e-6) for row in rows if row.path == "d2d"]:
        found["d2d_bytes_per_s"] = _quantity(float(f"{median(gathers):.4g}"), text)
        found["gather_cv"] = _quantity(_cv([rate / median(gathers) for rate in gathers]), text)
    return found


def _restoring(rows: list[Restored], files: dict[str, ModelFiles], tp: int, source: str) -> dict[str, Any]:
    """The line through what restores of prefixes took, which costs nothing less than nothing; nothing where none was seen."""
    points = [(row.tokens * _kv_per_rank(files[row.model], tp), row.seconds) for row in rows]
    if sum(seconds for _, seconds in points) <= 0.0:
        return {}
    nbytes, seconds = np.array(points).T
    slope, base_s = np.polyfit(nbytes, seconds, 1) if len(set(nbytes)) > 1 else (0.0, 0.0)
    if slope <= 0.0 or base_s < 0.0:
        slope, base_s = float((nbytes * seconds).sum() / (nbytes * nbytes).sum()), 0.0
    text = f"{len(points)} prefixes from the host, beside the same on the device, {source}"
    return {
        "restore_bytes_per_s": _quantity(float(f"{1.0 / slope:.4g}"), text), "restore_base_s": _quantity(round(float(base_s), 6), text),
    }  # fmt: skip


def _assumed(measured: Measured, files: dict[str, ModelFiles], tp: int, hbm_bytes: int | None) -> dict[str, Any]:
    """A machine around the engines' own KV pools: simulated pools are as large as the largest real one needs."""
    known = _moved(measured)
    need = max(
        known.get(model, files[model].weight_bytes // tp) + found.kv_tokens * _kv_per_rank(files[model], tp)
        for model, found in measured.models.items()
    )
    bump = need + RUNTIME_BYTES
    hbm = max(hbm_bytes or 0, int(bump / 0.8))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text, host = "so that the KV pools are those of the engines", "memory of the machine that talaria-gpu profile ran on"

    def source(name: str) -> str:
        if name.startswith("host_"):
            return host
        return text if "bytes" in name or "fraction" in name else "without a base profile"

    return {
        name: _quantity(value, source(name), "assumed")
        for name, value in {
            "hbm_bytes": hbm, "device_cap_bytes": int(0.97 * hbm), "bump_fraction": bump / hbm, "runtime_bytes": RUNTIME_BYTES,
            "residue_bytes": MIB, "host_weight_bytes": memory, "host_kv_bytes": max(1, memory // 4), "h2d_bytes_per_s": 1e10,
            "d2d_bytes_per_s": 2e10, "d2h_bytes_per_s": 1e10, "staging_bytes_per_s": 1e10, "restore_bytes_per_s": 1e10,
            "contention_factor": 1.0, "restore_base_s": 0.0, "save_phase_s": 0.0, "shell_phase_s": 0.0, "backend_phase_s": 0.0,
            "publish_phase_s": 0.0, "chunk_bytes": MIB, "prefill_cv": 0.0, "decode_cv": 0.0, "switch_cv": 0.0, "rank_spread_cv": 0.0,
        }.items()
    }  # fmt: skip


def _cv(ratios: list[float]) -> float:
    return round(min(MOST_CV, pstdev(ratios) if len(ratios) > 1 else 0.0), 4)


def scenario(cluster: ClusterConfig, profile_path: Path, gap_cap_s: float) -> dict[str, Any]:
    """The same cluster, simulated: the engines' capabilities, the cluster's knobs. The work is replaced by ``--trace``."""
    models = list(cluster.models)
    return {
        "schema": "talaria.scenario/1",
        "name": cluster.name,
        "about": f"The cluster {cluster.name} as talaria-gpu profile measured it.",
        "profile": str(profile_path.absolute()),
        "models": models,
        "instances": [
            {
                "count": 1, "pool": item.pool, "models": list(item.models), "opened": list(item.models),
                "max_resident_models": item.max_resident_models, "max_running": item.max_running, "inflight_kv": "recompute",
                "hkvr": item.host_kv_bytes > 0, "staging": item.arena is not None,
            }
            for item in cluster.instances
        ],
        "workload": {"preset": "quickstart", "models": models},
        "gap_cap_s": gap_cap_s,
        "knobs": dict(cluster.policy.knobs),
    }  # fmt: skip
