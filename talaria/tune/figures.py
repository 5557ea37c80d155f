"""The figures of a study: what each knob trades, two objectives against each other, the course of the search, importance."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from talaria.report.style import INK, MUTED, SERIES, panels, styled
from talaria.tune.goals import Objective
from talaria.tune.report import unit
from talaria.tune.space import Dimension
from talaria.tune.task import Task
from talaria.tune.validate import candidates, front

PANELS = 4
"""Knobs of the trade-off figure, the most important ones."""

Pictures = dict[str, tuple[str, str, Any]]
"""Title, caption and figure by file name."""


def importances(task: Task, trials: Sequence[FrozenTrial]) -> dict[str, float] | None:
    """Share of each knob in what separates good trials from the others (PED-ANOVA), largest first; None with too few trials."""
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    usable = [trial for trial in trials if trial.state == TrialState.COMPLETE and math.isfinite(trial.values[0])]
    if len(usable) < 8 or len({trial.values[0] for trial in usable}) < 2:
        return None
    study = optuna.create_study(directions=[goal.direction for goal in task.objectives])
    study.add_trials(usable)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(), target=lambda trial: trial.values[0])
    return {name: float(value) for name, value in found.items()}


def pictures(
    task: Task, trials: Sequence[FrozenTrial], best: FrozenTrial, baseline: Mapping[str, float], weights: Mapping[str, float] | None
) -> Pictures:
    """The figures that this study has data for; ``baseline``: its value of each objective on the same draws."""
    goal = task.objectives[0]
    found: Pictures = {}
    if len(task.objectives) > 1:
        caption = f"Trials that hold the constraints; no other betters those on the line in both. The policy is trial {best.number}."
        found["trade-off"] = ("Trade-off", caption, objectives_tradeoff(task, trials, best, baseline))
    better = "lower" if goal.direction == "minimize" else "higher"
    caption = f"Every complete trial by knob, means over draws and scenarios; {better} is better. The line is the baseline."
    found["knobs"] = ("Knobs", caption, knob_tradeoff(task, trials, best, baseline[goal.name], weights))
    if len(task.space) > 1:
        caption = f"The two knobs that matter most; darker is better in {goal.name}. Complete trials and those stopped early."
        found["map"] = ("Map", caption, knob_map(task, trials, best, weights))
    caption = "Trials in their order, the best so far, and the baseline. Crosses were stopped early by the draws that they had seen."
    found["search"] = ("Search", caption, course(goal, trials, baseline[goal.name]))
    if weights:
        caption = f"Share of each knob in what separates the best trials by {goal.name} from the others (PED-ANOVA)."
        found["importance"] = ("Importance", caption, importance(weights))
    return found


@styled
def objectives_tradeoff(task: Task, trials: Sequence[FrozenTrial], best: FrozenTrial, baseline: Mapping[str, float]) -> Any:
    """The first two objectives of every candidate, and the front."""
    figure, (axes,) = panels()
    possible = candidates(task, trials)
    line = front(task, possible)
    axes.plot(*_columns(possible), "o", color=MUTED, alpha=0.5, markersize=4, label="trials")
    axes.plot(*_columns(line), "o-", color=SERIES[0], markersize=6, label="front")
    x, y = task.objectives[:2]
    axes.plot([baseline[x.name]], [baseline[y.name]], "s", color=SERIES[1], markersize=8, markeredgecolor="white", label="baseline")
    _mark_policy(axes, *best.values[:2])
    axes.set(title="Trade-off", xlabel=_label(x.name), ylabel=_label(y.name))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@styled
def knob_tradeoff(
    task: Task, trials: Sequence[FrozenTrial], best: FrozenTrial, baseline: float, weights: Mapping[str, float] | None
) -> Any:
    """One panel a knob: its value against the first objective."""
    space = _by_weight(task.space, weights)[:PANELS]
    figure, axes_of = panels(len(space))
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE and math.isfinite(trial.values[0])]
    for axes, item in zip(axes_of, space, strict=True):
        axes.plot(
            [_shown(trial.params[item.name]) for trial in complete], [trial.values[0] for trial in complete], "o", color=SERIES[0],
            alpha=0.45, markersize=4,
        )  # fmt: skip
        _mark_policy(axes, _shown(best.params[item.name]), best.values[0])
        _mark_baseline(axes, baseline)
        if item.log:
            axes.set_xscale("log")
            _plain(axes.xaxis)
        axes.set(xlabel=_axis(item))
    axes_of[0].set(ylabel=_label(task.objectives[0].name), title="What each knob trades")
    axes_of[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@styled
def knob_map(task: Task, trials: Sequence[FrozenTrial], best: FrozenTrial, weights: Mapping[str, float] | None) -> Any:
    """Where in the plane of two knobs the good trials lie."""
    figure, (axes,) = panels()
    y, x = _by_weight(task.space, weights)[:2]
    shown = sorted((trial for trial in trials if trial.values and math.isfinite(trial.values[0])), key=lambda trial: -trial.values[0])
    worst = _quantile([trial.values[0] for trial in shown], 0.9 if task.objectives[0].direction == "minimize" else 0.1)
    lower = task.objectives[0].direction == "minimize"
    points = axes.scatter(
        [_shown(trial.params[x.name]) for trial in shown], [_shown(trial.params[y.name]) for trial in shown],
        c=[min(trial.values[0], worst) if lower else max(trial.values[0], worst) for trial in shown],
        cmap="Blues_r" if lower else "Blues", s=46, edgecolors=MUTED, linewidths=0.4,
    )  # fmt: skip
    _mark_policy(axes, _shown(best.params[x.name]), _shown(best.params[y.name]))
    for item, set_scale, axis in ((x, axes.set_xscale, axes.xaxis), (y, axes.set_yscale, axes.yaxis)):
        if item.log:
            set_scale("log")
            _plain(axis)
    axes.set(title="Map", xlabel=_axis(x), ylabel=_axis(y))
    figure.colorbar(points, ax=axes, label=_label(task.objectives[0].name))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return figure


@styled
def course(goal: Objective, trials: Sequence[FrozenTrial], baseline: float) -> Any:
    """Values by trial number, and the best so far."""
    figure, (axes,) = panels()
    pick = min if goal.direction == "minimize" else max
    shown = [trial for trial in trials if trial.values and math.isfinite(trial.values[0])]
    complete = [trial for trial in shown if trial.state == TrialState.COMPLETE]
    stopped = [trial for trial in shown if trial.state == TrialState.PRUNED]
    if stopped:
        axes.plot([trial.number for trial in stopped], [trial.values[0] for trial in stopped], "x", color=MUTED, label="stopped early")
    axes.plot([trial.number for trial in complete], [trial.values[0] for trial in complete], "o", color=SERIES[0], alpha=0.5, markersize=4)
    best = [pick(trial.values[0] for trial in complete[: count + 1]) for count in range(len(complete))]
    axes.step([trial.number for trial in complete], best, where="post", color=SERIES[2], label="best so far")
    _mark_baseline(axes, baseline)
    axes.set(title="Search", xlabel="trial", ylabel=_label(goal.name))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper right")
    return figure


@styled
def importance(weights: Mapping[str, float]) -> Any:
    """One bar a knob."""
    figure, (axes,) = panels(height_in=0.9 + 0.42 * max(len(weights), 2))
    names = list(weights)
    axes.barh(range(len(names)), list(weights.values()), height=0.6, color=SERIES[0])
    axes.set(title="Importance", xlabel="share", xlim=(0, 1))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    return figure


def _by_weight(space: Sequence[Dimension], weights: Mapping[str, float] | None) -> list[Dimension]:
    """The most important first."""
    return sorted(space, key=lambda item: -(weights or {}).get(item.name, 0.0))


def _axis(item: Dimension) -> str:
    return f"{item.name}, {item.unit}" if item.unit else item.name


def _plain(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:g}")


def _quantile(values: Sequence[float], part: float) -> float:
    """Beyond it one shade serves: a few very bad trials would make all others look alike."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def _mark_baseline(axes: Any, value: float) -> None:
    if math.isfinite(value):
        axes.axhline(value, color=SERIES[1], linewidth=1.5, linestyle=(0, (4, 3)), label="baseline", zorder=4)


def _mark_policy(axes: Any, x: Any, y: Any) -> None:
    axes.plot([x], [y], "*", color=SERIES[2], markersize=14, markeredgecolor="white", label="policy", zorder=6)


def _columns(trials: Sequence[FrozenTrial]) -> tuple[list[float], list[float]]:
    return [trial.values[0] for trial in trials], [trial.values[1] for trial in trials]


def _shown(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _label(name: str) -> str:
    return f"{name}, {unit(name)}" if unit(name) and not name.endswith(f"_{unit(name)}") else name
