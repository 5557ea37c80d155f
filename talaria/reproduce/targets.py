"""The published numbers, each declared once with what predicts it: ``targets.yaml``, checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from talaria.validation import parse
from talaria.yamlfile import read_mapping

DATA = Path(__file__).parent / "targets.yaml"

Number = int | float
Published = Annotated[Number | list[Number] | list[str], Field(union_mode="left_to_right")]
Kind = Literal["result", "setting", "sample"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSource(_Strict):
    """A metric of ``config`` on the scenario ``run``. ``versus``: the configuration against which sessions improve."""

    run: str
    config: str
    metric: str
    tau: float | None = None
    versus: str | None = None


class ComponentSource(_Strict):
    """A percentile over all ranks of the component run's switches by one path; ``phase``: p1 to p5, or total."""

    component: Literal["d2d", "partial", "h2d"]
    phase: str
    percent: Literal[50, 95]

    @property
    def measure(self) -> str:
        return f"{self.component}_{self.phase}_p{self.percent}_s"


class DrawSource(_Strict):
    """A statistic of a workload preset's draw, or of a scenario's. ``given``: fixed by the preset, not drawn."""

    workload: str
    statistic: str
    given: bool = False


class CurveSource(_Strict):
    """Seconds that ``model`` takes on ``profile`` to recompute a lost prefix."""

    profile: str
    model: str
    lost_tokens: int


class SettingSource(_Strict):
    """What ``scenario`` takes over from the source as an input; see ``experiments.SETTINGS``."""

    setting: str
    scenario: str


Source = RunSource | ComponentSource | DrawSource | CurveSource | SettingSource


class Target(_Strict):
    """One published number. ``at`` is its place below its group's root in the list of published numbers, keys joined by "/"."""

    at: str
    value: Published
    unit: str = ""
    by: Source | None = None
    """None: the size of a published sample, which nothing predicts."""
    notes: tuple[str, ...] = ()
    """Keys of ``TargetFile.notes``."""

    @property
    def kind(self) -> Kind:
        """A result is compared and counts in the errors; a setting is an input of ours too; a sample is a published statistic's size."""
        if self.by is None:
            return "sample"
        given = isinstance(self.by, SettingSource) or (isinstance(self.by, DrawSource) and self.by.given)
        return "setting" if given else "result"


class Group(_Strict):
    """Targets of one published experiment. ``root`` is their common place, keys joined by "/".

    ``pairs`` names the members of published lists, where a target is one of them.
    """

    name: str
    title: str
    root: str
    pairs: tuple[str, ...] = ()
    targets: tuple[Target, ...]


class TargetFile(_Strict):
    """All published numbers. ``notes`` say where they contradict each other and what they cannot show."""

    schema_: Literal["talaria.targets/1"] = Field(alias="schema")
    source: str
    notes: dict[str, str]
    groups: tuple[Group, ...]

    def targets(self) -> Iterator[tuple[Group, Target]]:
        """Every target with its group, in the order of the file."""
        return ((group, target) for group in self.groups for target in group.targets)


def load() -> TargetFile:
    """The shipped targets."""
    return parse(TargetFile, read_mapping(DATA, ("schema", "source", "notes", "groups")), str(DATA))
