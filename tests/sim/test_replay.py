"""A decision log is complete, exact and the same every time; replayed, it agrees with the policy or says where it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from talaria.errors import InputError
from talaria.policy.codec import CODEC
from talaria.profiles import load
from talaria.report.declog import DecisionLog
from talaria.report.replay import KEPT, replay
from talaria.sim.config import CONFIGS
from talaria.sim.run import simulate
from tests.sim.small import small_plan

Record = dict[str, Any]


def logged(path: Path, scenario: str = "quickstart", config: str = "talaria") -> Path:
    with DecisionLog(path) as log:
        simulate(small_plan(scenario, config), 3, log=log)
    return path


@pytest.fixture(scope="module")
def log_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return logged(tmp_path_factory.mktemp("log") / "decisions.jsonl").read_text().splitlines(keepends=True)


@pytest.fixture
def changed_log(log_lines: list[str], tmp_path: Path) -> Callable[[int, Callable[[Record], Any]], Path]:
    """Writes the log again with one line changed."""

    def write(number: int, change: Callable[[Record], Any]) -> Path:
        record = json.loads(log_lines[number - 1])
        change(record)
        path = tmp_path / "decisions.jsonl"
        path.write_text("".join([*log_lines[: number - 1], json.dumps(record) + "\n", *log_lines[number:]]))
        return path

    return write


@pytest.mark.parametrize(
    ("scenario", "config"), [*(("quickstart", name) for name in CONFIGS), ("hot-cold", "talaria"), ("four-by-five", "talaria")]
)
def test_a_log_replays_without_differences(scenario: str, config: str, tmp_path: Path) -> None:
    found = replay(logged(tmp_path / "decisions.jsonl", scenario, config))
    assert (found.count, found.first) == (0, []) and found.decisions > 50


def test_the_same_seed_logs_the_same_bytes(log_lines: list[str], tmp_path: Path) -> None:
    assert logged(tmp_path / "again.jsonl").read_text() == "".join(log_lines)


def test_logging_does_not_change_the_run(tmp_path: Path) -> None:
    plan = small_plan()
    with DecisionLog(tmp_path / "decisions.jsonl") as log:
        record = simulate(plan, 3, log=log)
    assert record.calls.__getstate__() == simulate(plan, 3).calls.__getstate__()


def first_line(log_lines: list[str], *parts: str) -> int:
    return next(number for number, line in enumerate(log_lines, 1) if all(part in line for part in parts))


def test_a_changed_decision_is_a_difference_at_its_line(log_lines: list[str], changed_log: Any) -> None:
    number = first_line(log_lines, '"do":"place"')
    found = replay(changed_log(number, lambda record: record["out"]["Routed"].update(cost_s=-1.0)))
    assert (found.count, found.first[0].line, found.first[0].who) == (1, number, "router place")
    assert '"cost_s": -1.0' in found.first[0].logged and '"cost_s": -1.0' not in found.first[0].replayed


def test_a_changed_input_changes_decisions(log_lines: list[str], changed_log: Any) -> None:
    def forget(record: Record) -> None:
        record["args"][0]["Call"]["prompt_tokens"] *= 3

    number = first_line(log_lines, '"do":"place"')
    found = replay(changed_log(number, forget))
    assert found.count > 0 and found.first[0].line == number and len(found.first) <= KEPT


def test_a_slot_command_that_was_not_given_is_a_difference(log_lines: list[str], changed_log: Any) -> None:
    number = first_line(log_lines, '"who":"slots"', '"Admit"')
    found = replay(changed_log(number, lambda record: record["commands"].clear()))
    assert found.count == 1 and found.first[0].who == "slots of cold-0" and found.first[0].logged == "[]"


def test_an_input_on_which_the_policy_fails_is_a_difference_and_ends_the_replay(log_lines: list[str], changed_log: Any) -> None:
    number = first_line(log_lines, '"do":"completed"')
    found = replay(changed_log(number, lambda record: record["args"].__setitem__(1, "no such instance")))
    assert found.count == 1 and found.first[0].replayed.startswith("raised ") and found.decisions < len(log_lines) - 1


BROKEN = [
    (2, lambda record: record.update(do="forget"), "the router cannot 'forget'"),
    (2, lambda record: record.update(do="_close"), "the router cannot '_close'"),
    (2, lambda record: record.update(do="lease_counts"), "the router cannot 'lease_counts'"),
    (2, lambda record: record.update(who="oracle"), "no record of a router or slots decision"),
    (2, lambda record: record.pop("out"), "no record of a router or slots decision"),
    (2, lambda record: record["args"].__setitem__(0, {"Snapshot": {}}), "unknown type 'Snapshot'"),
    (2, lambda record: record["args"].__setitem__(0, {"Call": {"id": 1}}), "Call does not fit its content"),
    (1, lambda record: record.update(schema="talaria.decisions/2"), "schema is 'talaria.decisions/2'; allowed: talaria.decisions/1"),
    (1, lambda record: record["router"].update(name="ful"), "unknown router 'ful'.*did you mean 'full'"),
    (1, lambda record: record["router"]["arguments"].pop("knobs"), "does not describe the policies"),
    (1, lambda record: record.pop("slots"), "does not describe the policies"),
    (1, lambda record: record.update(slots=[]), "does not describe the policies"),
]


@pytest.mark.parametrize(("number", "change", "complaint"), BROKEN, ids=[complaint for *_, complaint in BROKEN])
def test_a_broken_record_is_refused_with_file_and_line(number: int, change: Any, complaint: str, changed_log: Any) -> None:
    with pytest.raises(InputError, match=rf"decisions\.jsonl:{number}: .*{complaint}"):
        replay(changed_log(number, change))


def test_an_unknown_instance_is_refused_with_the_nearest(log_lines: list[str], changed_log: Any) -> None:
    number = first_line(log_lines, '"who":"slots"')
    with pytest.raises(InputError, match=rf":{number}: unknown instance 'cold-1'; allowed: cold-0; did you mean 'cold-0'"):
        replay(changed_log(number, lambda record: record.update(instance="cold-1")))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "decisions.jsonl: the decision log is empty"),
        ("3\n", ":1: schema is 3"),
        ("[]\n", r":1: schema is \[\]"),
        ("{}\n", ":1: schema is None; allowed: talaria.decisions/1"),
        ("not json\n", ":1: is no JSON"),
        ('{"schema":"talaria', ":1: the log breaks off"),
    ],
)
def test_what_is_no_log_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=complaint):
        replay(path)


def test_a_log_that_breaks_off_is_refused_at_its_last_line(log_lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(log_lines[:9]) + log_lines[9][:40])
    with pytest.raises(InputError, match=":10: the log breaks off in the middle of a record"):
        replay(path)


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_log_is_refused_or_replayed_but_never_a_crash(data: st.DataObject, log_lines: list[str], tmp_path: Path) -> None:
    lines = log_lines[:12]
    number = data.draw(st.integers(0, len(lines) - 1), label="line")
    line = lines[number]
    at = data.draw(st.integers(0, len(line) - 1), label="column")
    length = data.draw(st.integers(0, 12), label="removed")
    put_in = data.draw(st.sampled_from(["", "0", '"', "null", "{", "]", "-1", ","]), label="put in")
    lines[number] = line[:at] + put_in + line[at + length :]
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(lines))
    try:
        assert replay(path).count >= 0
    except InputError as error:
        assert str(path) in str(error)


def test_the_header_names_the_output_priors_that_the_profile_gave_the_router(log_lines: list[str]) -> None:
    arguments = CODEC.decode(json.loads(log_lines[0])["router"]["arguments"]["output_tokens"])
    assert arguments == {name: load("paper-tp8").model(name).output_tokens_prior for name in arguments} and len(arguments) == 3


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(InputError, match="cannot be read"):
        replay(path)


def test_a_run_that_fails_leaves_no_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), DecisionLog(tmp_path / "decisions.jsonl"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
