"""A call travels as the codec of the policies would write it."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.gpu.protocol.submission import read_call, write_call
from talaria.policy.calls import Call, LineKey
from talaria.policy.codec import CODEC

COUNTS = st.integers(0, 10**12)
TIMES = st.floats(0.0, 1e12)
CALLS = st.builds(
    Call, COUNTS, st.builds(LineKey, *4 * [st.text()]), COUNTS, TIMES, COUNTS, COUNTS, st.none() | COUNTS,
    st.lists(st.tuples(st.text(), COUNTS), max_size=3).map(tuple), st.none() | TIMES, st.booleans(),
)  # fmt: skip


@given(CALLS)
def test_a_call_is_written_and_read_as_by_the_codec(call: Call) -> None:
    document = json.loads(write_call(call))
    assert document == CODEC.encode(call)
    assert read_call(json.dumps(document).encode()) == CODEC.decode(document) == call
    assert type(read_call(write_call(call)).key) is LineKey


@pytest.mark.parametrize("document", [b"", b"{}", b'{"Call": {}}', b'{"Call": {"id": "1"}}', b'{"LineKey": ["t", "s", "m", "l"]}'])
def test_what_is_no_call_is_refused(document: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_call(document)
