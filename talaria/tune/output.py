"""What a finished study leaves: ``policy.yaml``, ``tune.json``, figures and ``report.html``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from optuna.trial import FrozenTrial, TrialState

from talaria import __version__
from talaria.policy.knobs import BY_NAME, value_text
from talaria.report.document import Document, rounded, to_json
from talaria.report.files import write_together
from talaria.report.style import to_png
from talaria.sim.interrupts import deferred
from talaria.sim.parallel import Pool
from talaria.tune.search import DRAWS, REFUSED
from talaria.tune.space import INSTANCES
from talaria.tune.task import Task, scenario_document
from talaria.tune.validate import (
    Draws,
    Improvement,
    Validation,
    candidates,
    choose,
    front,
    improvements,
    overfits,
    replayed,
    validate,
)

SCHEMA, POLICY_SCHEMA = "talaria.tune/1", "talaria.policy/1"


def finish(
    task: Task, trials: Sequence[FrozenTrial], unseen: Sequence[int], pool: Pool, out: Path, *, study: str, storage: str
) -> Document:
    """Choose, validate and write; returns ``talaria.tune/1``. Raises InputError, and writes nothing, if no trial holds the constraints."""
    from talaria.tune import figures, page

    best = choose(task, trials)
    tuned = task.used(best.params)
    validation = validate(task, tuned, unseen, pool)
    (base,) = replayed(task, [{}], task.seeds, pool)
    weights = figures.importances(task, trials)
    document = _document(task, trials, best, base, validation, weights)
    document |= {"study": study, "storage": storage, "policy": str(out / "policy.yaml")}
    document = {name: rounded(value) for name, value in document.items()}
    baseline = {name: entry["baseline"] for name, entry in document["tuning"].items()}
    pictures = figures.pictures(task, trials, best, baseline, weights)
    files = {f"{name}.png": to_png(figure) for name, (_, _, figure) in pictures.items()}
    files |= {"tune.json": to_json(document).encode(), "report.html": page.render(document, list(pictures.values())).encode()}
    for item in task.scenarios if INSTANCES in tuned else ():
        sized = yaml.safe_dump(scenario_document(task.sized(item, tuned)), sort_keys=False, allow_unicode=True)
        files[f"scenario-{item.name}.yaml"] = sized.encode()
    files["policy.yaml"] = policy_text(task, tuned, document).encode()
    with deferred():  # new figures beside an old policy would be no set
        write_together({out / name: content for name, content in files.items()})
    return document


def _document(
    task: Task, trials: Sequence[FrozenTrial], best: FrozenTrial, base: Draws, validation: Validation,
    weights: Mapping[str, float] | None,
) -> Document:  # fmt: skip
    seen = improvements(task, base, best.user_attrs[DRAWS])
    goals = {goal.name: goal for goal in task.objectives}

    def entry(name: str, item: Improvement) -> Document:
        return {
            "baseline": item.baseline, "tuned": item.tuned, "improvement": item.mean, "ci95": [item.low, item.high],
            "relative": goals[name].relative, "verdict": item.verdict,
        }  # fmt: skip

    return {
        "schema": SCHEMA,
        "trials": {
            "finished": len(trials),
            "complete": sum(trial.state == TrialState.COMPLETE for trial in trials),
            "pruned": sum(trial.state == TrialState.PRUNED and REFUSED not in trial.user_attrs for trial in trials),
            "refused": sum(REFUSED in trial.user_attrs for trial in trials),
        },
        "best": _trial(task, best),
        "baseline": {item.name: task.settings(item) for item in task.scenarios},
        "front": [_trial(task, trial) for trial in front(task, candidates(task, trials))],
        "importance": dict(weights) if weights else None,
        "tuning": {name: entry(name, item) for name, item in seen.items()},
        "validation": {
            "seeds": list(validation.seeds),
            "objectives": {
                name: {**entry(name, item), "overfits": overfits(seen[name], item)} for name, item in validation.overall.items()
            },
            "by_scenario": {
                scenario: {name: entry(name, item) for name, item in of.items()} for scenario, of in validation.by_scenario.items()
            },
            "missed": list(validation.missed),
        },
        "task": task.document(),
        "provenance": {"version": __version__},
    }


def _trial(task: Task, trial: FrozenTrial) -> Document:
    values = dict(zip((goal.name for goal in task.objectives), trial.values, strict=True))
    return {"trial": trial.number, "knobs": task.used(trial.params), "values": values}


def policy_text(task: Task, tuned: Mapping[str, Any], document: Document) -> str:
    """``talaria.policy/1``: the knobs with their units, and where they come from. Nothing in it depends on when it was written."""
    knobs = {**task.knobs, **{name: value for name, value in tuned.items() if name != INSTANCES}}
    lines = [f"schema: {POLICY_SCHEMA}", f"config: {task.config.name}", "knobs:"]
    lines += [f"  {name}: {_scalar(value)}  # {_said(name)}" for name, value in knobs.items()]
    about = document["task"]
    checked = document["validation"]
    seeds = checked["seeds"]
    files = {item.name: f"scenario-{item.name}.yaml" if INSTANCES in tuned else item.name for item in task.scenarios}
    provenance = {
        "by": f"talaria-sim tune {__version__}",
        "study": document["study"],
        "storage": document["storage"],
        "trial": document["best"]["trial"],
        "units": {name: BY_NAME[name].unit for name in knobs if BY_NAME[name].unit},
        **({INSTANCES: tuned[INSTANCES]} if INSTANCES in tuned else {}),
        **{name: about[name] for name in ("scenarios", "profiles", "code", "traces", "objectives", "constraints") if about[name]},
        "tuned_on_seeds": about["seeds"],
        "validation": {
            "seeds": f"{seeds[0]}:{seeds[-1] + 1}",
            "baseline": document["baseline"],
            "objectives": checked["objectives"],
            "by_scenario": checked["by_scenario"],
            "missed": checked["missed"],
        },
        "again": [f"talaria-sim run --scenario {files[name]} --policy policy.yaml --seeds {seeds[0]}:{seeds[-1] + 1}" for name in files],
    }
    return "\n".join(lines) + "\n" + yaml.safe_dump({"provenance": provenance}, sort_keys=False, allow_unicode=True, width=120)


def _scalar(value: Any) -> str:
    text: str = yaml.safe_dump(value)
    return text.splitlines()[0]


def _said(name: str) -> str:
    knob = BY_NAME[name]
    return f"{knob.unit}: {knob.meaning}" if knob.unit else f"{knob.meaning} (default {value_text(knob.default)})"
