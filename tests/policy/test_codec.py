"""The codec's one promise: what is decoded equals what was encoded, type for type."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.policy import instance
from talaria.policy.calls import Call, LineKey
from talaria.policy.codec import CODEC, Codec, CodecError, value_types
from talaria.policy.instance import CallView, EngineView, ModelView
from talaria.policy.knobs import Knobs
from talaria.policy.snapshot import Capabilities, InstanceSnapshot, LineState, ModelSnapshot, Residency, Tier
from talaria.policy.timing import Timing

words = st.text(max_size=6)
times = st.floats(allow_nan=False)
counts = st.integers(0, 2**40)
keys = st.builds(LineKey, words, words, words, words)
calls = st.builds(
    Call, counts, keys, counts, times, counts, counts, st.none() | counts, st.lists(st.tuples(words, counts), max_size=2).map(tuple),
    st.none() | times, st.booleans(),
)  # fmt: skip
timings = st.from_type(Timing)
views = st.builds(
    EngineView,
    st.from_type(Capabilities),
    st.dictionaries(
        words,
        st.builds(
            ModelView, timings, st.sampled_from(Residency), times,
            waiting=st.dictionaries(counts, st.builds(CallView, calls, times, counts, counts), max_size=2),
            leases=st.dictionaries(keys, st.tuples(times, times), max_size=2),
        ),
        max_size=2,
    ),
    active=st.none() | words,
)  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | times | words | st.sampled_from(Tier)
hashables = st.recursive(scalars | keys, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3))
values = st.recursive(
    hashables | calls | st.from_type(Capabilities),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hashables, inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=10,
)


def through_json(value: Any) -> Any:
    return CODEC.decode(json.loads(json.dumps(CODEC.encode(value), allow_nan=False)))


def typed(value: Any) -> str:
    """A text that differs wherever a type, a value or an order differs (1, 1.0 and True are equal in Python)."""
    return repr(value) if not isinstance(value, set | frozenset) else f"{type(value).__name__}{sorted(map(repr, value))}"


@given(values)
def test_any_value_survives_the_trip_through_json_with_its_types(value: Any) -> None:
    back = through_json(value)
    assert back == value and type(back) is type(value)


@given(views)
def test_an_engine_view_survives_with_the_order_of_its_calls(view: EngineView) -> None:
    assert typed(through_json(view)) == typed(view)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 0.1 + 0.2, 5e-324, 1, 1.0, True])
def test_a_number_keeps_its_type_and_every_bit(value: float) -> None:
    assert typed(through_json(value)) == typed(value)


def test_not_a_number_survives_and_needs_no_json_extension() -> None:
    assert math.isnan(through_json(math.nan))


def test_a_snapshot_survives() -> None:
    coefficients: dict[str, Any] = {field.name: 0.1 for field in fields(Timing)}
    timing = Timing(**coefficients)
    model = ModelSnapshot(Residency.STAGED, 0.5, 1, 2, 0.25, math.inf, 0.0, 100, 200, timing)
    key = LineKey("t", "s", "m", "main")
    line = LineState(Tier.HOST, 640, 3.5)
    snapshot = InstanceSnapshot("i0", 7, 1.5, 3, True, Capabilities(), {"m": model}, {key: line}, 1.0, 2.0, 0, 1, 2, 3, 4, 5)
    assert through_json(snapshot) == snapshot


def test_equal_sets_have_equal_encodings() -> None:
    assert CODEC.encode({"a", "b", "c"}) == CODEC.encode({"c", "b", "a"})


def test_every_event_and_command_is_known() -> None:
    known = {kind.__name__ for kind in value_types(instance)}
    assert {kind.__name__ for kind in (*instance.Event.__args__, *instance.Command.__args__)} <= known


def test_a_numpy_float_is_a_float() -> None:
    assert type(through_json(np.float64(0.1))) is float


class Stranger:
    pass


@pytest.mark.parametrize("value", [Stranger(), np.arange(3), np.int64(3), (1, [Stranger()])])
def test_a_live_object_or_an_array_is_refused(value: object) -> None:
    with pytest.raises(CodecError, match="cannot encode"):
        CODEC.encode(value)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"Cal": {}}, "unknown type 'Cal'"),
        ({"Call": {"id": 1}}, "Call does not fit"),
        ({"Call": {"idd": 1}}, "Call does not fit"),
        ({"Call": 3}, "Call does not fit"),
        ({"Tier": "disk"}, "Tier does not fit"),
        ({"LineKey": ["only"]}, "LineKey does not fit"),
        ({"map": [[{"list": []}, 1]]}, "map does not fit"),
        ({"map": [1]}, "map does not fit"),
        ({"float": "much"}, "float does not fit"),
        ({"a": 1, "b": 2}, "exactly one key"),
        ({}, "exactly one key"),
    ],
)
def test_a_broken_document_says_what_is_wrong(document: Any, why: str) -> None:
    with pytest.raises(CodecError, match=why):
        CODEC.decode(document)


def test_two_types_of_one_name_are_refused() -> None:
    @dataclass
    class Call:
        pass

    with pytest.raises(CodecError, match="two types are named 'Call'"):
        Codec([*value_types(instance), Call, Call])


def test_a_plain_class_cannot_be_registered() -> None:
    with pytest.raises(CodecError, match="no dataclass"):
        Codec([Stranger])


class Pair(NamedTuple):
    a: int
    b: Knobs


def test_named_tuples_nest_dataclasses() -> None:
    codec = Codec([Pair, Knobs])
    assert codec.decode(codec.encode(Pair(1, Knobs()))) == Pair(1, Knobs())
