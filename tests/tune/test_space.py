"""What a study varies, read from the command line: names, ranges, and what is refused."""

from __future__ import annotations

import pytest

from talaria.errors import InputError
from talaria.policy.knobs import KNOBS, parse_value
from talaria.tune.space import INSTANCES, parse_space


def test_a_knob_without_a_range_takes_the_one_its_sweep_spans() -> None:
    (tau, gamma) = parse_space("tau,gamma")
    assert (tau.low, tau.high, tau.start, tau.unit) == (0.0, 5.0, 1.0, "s")
    assert (gamma.low, gamma.high, gamma.start) == (0.3, 1.0, 0.9)


def test_every_knob_can_be_varied_and_tries_only_values_that_are_allowed() -> None:
    for item in parse_space(",".join(knob.name for knob in KNOBS)):
        tried = item.choices or (item.low, item.high, item.start)
        assert [parse_value(item.name, item.used(value)) for value in tried] == list(tried), item.name
        item.distribution()


def test_a_number_is_run_with_three_digits_and_stays_inside_its_range() -> None:
    (tau,) = parse_space("tau=0.12345:4.9876")
    assert [tau.used(value) for value in (1.23456, 0.12345, 4.9876)] == [1.23, 0.12345, 4.9876]


def test_a_default_outside_the_range_begins_at_its_nearest_end() -> None:
    assert parse_space("tau=2:4")[0].start == 2.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nuu", "did you mean 'nu'"),
        ("tau,tau", "each knob once"),
        ("tau,", "names no knob"),
        ("tau=", "names no knob"),
        ("tau=5:1", "LOW below HIGH"),
        ("tau=1", "NAME=LOW:HIGH"),
        ("tau=0:61", "a range within 0 to 60 s"),
        ("overload=queue:shed", "overload has no range"),
        ("max_wait_rounds=1.5:3", "a range within 1 to 100 rounds"),
        (INSTANCES, "instances=1:8"),
        ("instances=0:4", "whole numbers from 1"),
        ("instances=1.5:4", "whole numbers from 1"),
        ("instances=1:inf", "whole numbers from 1"),
        ("tau=nan:3", "LOW below HIGH"),
    ],
)
def test_what_cannot_be_varied_is_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError, match="--knobs") as raised:
        parse_space(text)
    assert said in str(raised.value) and "\n" not in str(raised.value)
