"""Option texts become values, or one precise complaint."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.cli import policyfile
from talaria.cli.options import check_files_wanted, parse_assignments, parse_knobs, parse_names, parse_seeds
from talaria.errors import InputError


def assignments(*texts: str) -> dict[str, str]:
    return parse_assignments(texts, "--set", "KNOB=VALUE", "tau=2")


def test_assignments_keep_their_order_and_strip_blanks() -> None:
    assert list(assignments("b = 2", "a=1=1").items()) == [("b", "2"), ("a", "1=1")]


@pytest.mark.parametrize("text", ["tau", "tau=", "=1", "", "="])
def test_an_assignment_without_both_sides_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"--set: .*allowed: KNOB=VALUE; for example --set tau=2"):
        assignments(text)


def test_a_name_assigned_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'tau' is given twice"):
        assignments("tau=1", "tau=2")


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_a_seed_range_holds_its_first_and_not_its_last(first: int, count: int) -> None:
    assert parse_seeds(None, f"{first}:{first + count}", 1) == range(first, first + count)


def test_seeds_are_counted_from_zero_and_a_seed_is_itself() -> None:
    assert parse_seeds(None, "3", 10) == range(3)
    assert parse_seeds("7", None, 10) == range(7, 8)
    assert parse_seeds(None, None, 10) == range(10)


@pytest.mark.parametrize("text", ["", "0", "-1", "3:3", "5:2", "a", "1:", ":4", "1:2:3", "1.5", "1e3", "9" * 40])
def test_seeds_that_mean_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--seeds"):
        parse_seeds(None, text, 1)


def test_one_way_to_give_seeds_at_a_time() -> None:
    with pytest.raises(InputError, match="together with --seeds"):
        parse_seeds("1", "2", 1)


def test_knob_values_get_their_type() -> None:
    assert parse_knobs({"tau": "2", "visit_idle": "true", "sp_order": "cheapest", "queue_limit": 5}, "--set") == {
        "tau": 2.0, "visit_idle": True, "sp_order": "cheapest", "queue_limit": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("taw", "1", r"--set: unknown knob 'taw'; allowed: .*; did you mean 'tau'\?"),
        ("tau", "-1", r"--set: tau=-1 is not allowed; allowed: 0 to 60 s; tau is how long"),
        ("tau", "nan", "tau=nan is not allowed"),
        ("tau", "soon", "tau=soon is not allowed"),
        ("queue_limit", "1.5", "queue_limit=1.5 is not allowed"),
        ("visit_idle", "maybe", "allowed: false, true"),
        ("overload", "wait", "allowed: queue, shed, spill"),
    ],
)
def test_a_bad_knob_is_refused_with_what_is_allowed(name: str, value: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        parse_knobs({name: value}, "--set")


def test_names_are_split_at_commas() -> None:
    assert parse_names(" a, b,", ["a", "b", "c"], kind="letter", where="--letters") == ("a", "b")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("a,d", "unknown letter 'd'"), ("a,a", "given twice"), (",", "names no letter"), ("", "names no letter")],
)
def test_a_wrong_list_of_names_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=f"--letters: .*{complaint}"):
        parse_names(text, ["a", "b"], kind="letter", where="--letters")


@pytest.mark.parametrize("option", ["decisions", "timeline"])
def test_files_need_a_directory(option: str) -> None:
    wanted = {"decisions": False, "timeline": False, option: True}
    with pytest.raises(InputError, match=f"--{option}: .*add --out DIR"):
        check_files_wanted(None, **wanted)
    check_files_wanted(Path("results"), **wanted)


def policy(tmp_path: Path, text: str | bytes) -> policyfile.Policy:
    path = tmp_path / "policy.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return policyfile.load(path)


def test_a_policy_file_gives_knobs_and_a_config(tmp_path: Path) -> None:
    text = "schema: talaria.policy/1\nconfig: no-sp\nknobs: {tau: 2, visit_idle: true}\nprovenance: {study: a}\n"
    assert policy(tmp_path, text) == policyfile.Policy({"tau": 2.0, "visit_idle": True}, "no-sp")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ("- 1\n", "is a list"),
        ("schema: talaria.policy/1\nknobs: {tau: 1\n", r"policy.yaml:\d+: is no YAML"),
        ("knobs: {tau: 1}\n", "schema is None; allowed: talaria.policy/1"),
        ("schema: talaria.policy/1\nknob: {}\n", "unknown field 'knob'.*did you mean 'knobs'"),
        ("schema: talaria.policy/1\nknobs: [tau]\n", "knobs is"),
        ("schema: talaria.policy/1\nknobs: {taw: 1}\n", "unknown knob 'taw'.*did you mean 'tau'"),
        ("schema: talaria.policy/1\nknobs: {3: 1}\n", "unknown knob '3'"),
        ("schema: talaria.policy/1\nknobs: {tau: [1]}\n", "is not allowed"),
        ("schema: talaria.policy/1\nknobs: {tau: true}\n", "tau=True is not allowed"),
        ("schema: talaria.policy/1\nknobs:\n  tau: 1\n  tau: 2\n", r"policy.yaml:4: .*'tau' is given twice"),
        ("schema: talaria.policy/1\nconfig: 3\n", "config: unknown config '3'"),
        ("schema: talaria.policy/1\nconfig: talarai\n", "config: unknown config 'talarai'.*did you mean 'talaria'"),
        ("[" * 1000, "nested too deeply"),
        (b"schema: \xff\n", "byte 0xff is not UTF-8"),
    ],
)
def test_a_broken_policy_file_is_refused_by_name(tmp_path: Path, text: str | bytes, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as caught:
        policy(tmp_path, text)
    assert str(tmp_path / "policy.yaml") in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_policy_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.yaml: cannot be read"):
        policyfile.load(tmp_path / "absent.yaml")
