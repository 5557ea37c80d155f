"""Every tunable, once: name, unit, bounds, default and meaning. Policies read ``Knobs``, the command line and the docs ``KNOBS``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Knob:
    """One tunable. ``low``/``high`` are inclusive; ``choices`` replaces them for a named choice; ``log`` hints a tuner."""

    name: str
    field: str
    unit: str
    meaning: str
    source: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    log: bool = False
    sweep: tuple[Any, ...] = ()
    """Values that ``talaria-sim sweep`` tries by default."""

    @property
    def default(self) -> Any:
        """The value in ``Knobs``."""
        return getattr(DEFAULTS, self.field)

    @property
    def bounds(self) -> str:
        """The choices, or the range without its unit."""
        return ", ".join(self.choices) if self.choices else f"{self.low:.9g} to {self.high:.9g}"

    @property
    def allowed(self) -> str:
        """The choices, or the range with its unit."""
        return f"{self.bounds} {self.unit}" if self.unit else self.bounds


class KnobError(ValueError):
    """A knob name or value is not allowed; carries what the command line needs for its one line."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name, self.value, self.allowed = name, value, allowed
        super().__init__(f"{name}={value}: allowed {allowed}")


@dataclass(frozen=True, slots=True)
class Knobs:
    """The values of one run, and their defaults; what they mean stands in ``KNOBS``."""

    tau_s: float = 1.0
    gamma: float = 0.9
    nu_s: float = 20.0
    linger_s: float = 1.5
    lease_charge_s: float = 0.25
    t_ttft_s: float = 10.0
    t_tpot_s: float = 0.06
    control_window_s: float = 10.0
    mu0_s_per_gib: float = 0.02
    visit_idle: bool = False
    round_share: str = "equal"
    round_order: str = "stable"
    sp_order: str = "fifo"
    max_wait_rounds: int = 3
    ewma_alpha: float = 0.2
    stale_after_s: float = 5.0
    sticky_start: str = "pressure"
    overload: str = "spill"
    queue_limit: int = 256
    queue_deadline_s: float = 60.0
    stage_rate: float = 1.0


DEFAULTS = Knobs()

KNOBS: tuple[Knob, ...] = (
    Knob("tau", "tau_s", "s", "how long a completed call reserves its session's return to the same instance", "SPEC §3.1", 0.0, 60.0, sweep=(0.0, 0.5, 1.0, 2.0, 5.0)),
    Knob("gamma", "gamma", "", "round-length margin: a round is bounded by gamma times the TTFT target", "SPEC §4.4", 0.05, 1.0, sweep=(0.3, 0.5, 0.7, 0.9, 1.0)),
    Knob("nu", "nu_s", "s", "penalty against opening one more replica of a model", "SPEC §3.4", 0.0, 600.0, sweep=(0.0, 1.0, 5.0, 20.0, 60.0)),
    Knob("linger", "linger_s", "s", "how long an open slot waits for a return that a live lease promises", "SPEC §4.1", 0.0, 30.0, sweep=(0.0, 0.5, 1.0, 1.5, 3.0)),
    Knob("lease_charge", "lease_charge_s", "s", "admission seconds that a live lease charges against its instance in the router's overlay", "SPEC §3.1", 0.0, 10.0, sweep=(0.0, 0.1, 0.25, 0.5, 1.0)),
    Knob("t_ttft", "t_ttft_s", "s", "TTFT target that bounds a round", "SPEC §4.4", 0.1, 600.0, log=True, sweep=(5.0, 10.0, 20.0)),
    Knob("t_tpot", "t_tpot_s", "s", "average time per output token that protected decode keeps", "SPEC §4.3", 0.001, 10.0, log=True, sweep=(0.03, 0.06, 0.12)),
    Knob("control_window", "control_window_s", "s", "window over which demand for a model is counted for the replica gate", "SPEC §3.4", 0.1, 600.0, log=True, sweep=(2.0, 10.0, 60.0)),
    Knob("mu0", "mu0_s_per_gib", "s/GiB", "price of HBM at full pressure and no staging slack", "SPEC §3.4", 0.0, 10.0, sweep=(0.0, 0.02, 0.2, 2.0)),
    Knob("visit_idle", "visit_idle", "", "whether a round also visits opened models that have no work", "SPEC §4.3", choices=("false", "true"), sweep=(False, True)),
    Knob("round_share", "round_share", "", "how the round bound is shared: equal parts, or by predicted work", "SPEC §4.3", choices=("equal", "demand"), sweep=("equal", "demand")),
    Knob("round_order", "round_order", "", "order of models in a round: stable, or longest-waiting first", "SPEC §4.3", choices=("stable", "oldest"), sweep=("stable", "oldest")),
    Knob("sp_order", "sp_order", "", "order inside the eligible set: arrival, or cheapest first", "SPEC §4.3", choices=("fifo", "cheapest"), sweep=("fifo", "cheapest")),
    Knob("max_wait_rounds", "max_wait_rounds", "rounds", "after so many rounds a waiting call goes before returns and linger", "SPEC §4.1", 1, 100, sweep=(1, 3, 10)),
    Knob("ewma_alpha", "ewma_alpha", "", "weight of the newest round in the latency profiles", "SPEC §3.5", 0.0, 1.0, sweep=(0.0, 0.2, 0.5)),
    Knob("stale_after", "stale_after_s", "s", "age, by receive time, beyond which a snapshot admits no new placement", "SPEC §3.5", 0.05, 600.0, log=True, sweep=(1.0, 5.0, 30.0)),
    Knob("sticky_start", "sticky_start", "", "where router session-sticky starts a session: the least pressure, or the least cost (Eq. 1)", "SPEC §3.3", choices=("pressure", "cost"), sweep=("pressure", "cost")),
    Knob("overload", "overload", "", "what to do when no instance passes the checks", "SPEC §3.2", choices=("queue", "shed", "spill"), sweep=("queue", "shed", "spill")),
    Knob("queue_limit", "queue_limit", "calls", "most calls the router's own queue holds (overload=queue)", "SPEC §3.2", 0, 1_000_000, sweep=(16, 256)),
    Knob("queue_deadline", "queue_deadline_s", "s", "longest time in the router's own queue before the call is shed", "SPEC §3.2", 0.01, 3600.0, log=True, sweep=(10.0, 60.0)),
    Knob("stage_rate", "stage_rate", "", "share of the staging bandwidth that the next model's weights may use", "SPEC §5.3", 0.0, 1.0, sweep=(0.25, 0.5, 1.0)),
)  # fmt: skip

BY_NAME: dict[str, Knob] = {knob.name: knob for knob in KNOBS}
assert {knob.field for knob in KNOBS} == {item.name for item in fields(Knobs)}


def parse_value(name: str, text: object) -> Any:
    """The value of knob ``name`` from a string or a YAML scalar.

    Raises KnobError with what is allowed if the knob is unknown, the value does not parse or is out of bounds.
    """
    knob = BY_NAME.get(name)
    if knob is None:
        raise KnobError(name, text, ", ".join(BY_NAME))
    if isinstance(knob.default, bool):
        word = str(text).lower()
        if word not in knob.choices:
            raise KnobError(name, text, knob.allowed)
        return word == "true"
    if knob.choices:
        if str(text) not in knob.choices:
            raise KnobError(name, text, knob.allowed)
        return str(text)
    try:
        if isinstance(text, bool):
            raise ValueError
        value = float(text)  # type: ignore[arg-type]
        if isinstance(knob.default, int):
            if value != int(value):
                raise ValueError
            value = int(value)
    except (TypeError, ValueError, OverflowError):
        raise KnobError(name, text, knob.allowed) from None
    assert knob.low is not None and knob.high is not None
    if not knob.low <= value <= knob.high:
        raise KnobError(name, text, knob.allowed)
    return value


def with_values(base: Knobs, values: dict[str, object]) -> Knobs:
    """``base`` with knobs replaced by command-line name, parsed and checked. Raises KnobError as ``parse_value`` does."""
    parsed = {name: parse_value(name, value) for name, value in values.items()}
    return replace(base, **{BY_NAME[name].field: value for name, value in parsed.items()})


def value_text(value: Any) -> str:
    """A knob's value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def as_dict(knobs: Knobs) -> dict[str, Any]:
    """Values by command-line name, in registry order."""
    return {knob.name: getattr(knobs, knob.field) for knob in KNOBS}
