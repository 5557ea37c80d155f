"""Columns give back every value that went in, whether its chunk is open or put away."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import numpy as np
import pytest

from talaria.report.columns import CHUNK_ROWS, Columns
from talaria.report.record import call_columns

TYPES = {"code": "B", "signed": "b", "number": "I", "short_s": "f", "time_s": "d", "bytes_": "Q"}


def random_rows(count: int) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(count)
    whole = (rng.integers(0, high, count).tolist() for high in (256, 128, 2**32, 2**62))
    code, signed, number, size = whole
    short_s = rng.random(count).astype(np.float32).tolist()
    return list(zip(code, [-value for value in signed], number, short_s, rng.normal(1e5, 1e5, count).tolist(), size, strict=True))


def filled(rows: list[tuple[Any, ...]]) -> Columns:
    columns = Columns(**TYPES)
    for row in rows:
        columns.append(*row)
    return columns


def rows_of(columns: Columns) -> list[tuple[Any, ...]]:
    return list(zip(*(columns[name].tolist() for name in columns.names), strict=True))


@pytest.mark.parametrize("count", [0, 1, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS + 5])
def test_rows_come_back_exactly_and_in_order(count: int) -> None:
    rows = random_rows(count)
    columns = filled(rows)
    assert len(columns) == count and rows_of(columns) == rows


def test_a_pickled_copy_holds_the_same_rows_and_goes_on_growing() -> None:
    rows = random_rows(CHUNK_ROWS + 7)
    copy = pickle.loads(pickle.dumps(filled(rows)))
    copy.append(*rows[0])
    assert rows_of(copy) == [*rows, rows[0]]


def test_an_array_that_was_given_out_does_not_change() -> None:
    columns = filled(random_rows(3))
    before = columns["number"]
    kept = before.tolist()
    for row in random_rows(CHUNK_ROWS):
        columns.append(*row)
    assert before.tolist() == kept


@pytest.mark.parametrize("row", [(256, 0, 0, 0.0, 0.0, 0), (0, 0, 0, 0.0, 0.0)], ids=["too large", "too few"])
def test_a_row_that_does_not_fit_is_refused_and_leaves_nothing(row: tuple[Any, ...]) -> None:
    rows = random_rows(5)
    columns = filled(rows)
    with pytest.raises(struct.error):
        columns.append(*row)
    columns.append(*rows[0])
    assert rows_of(columns) == [*rows, rows[0]]


def test_a_call_is_kept_in_half_of_its_row() -> None:
    """What a long run leaves behind must stay below 64 bytes a call, rounds and switches included."""
    calls, rng = call_columns(), np.random.default_rng(0)
    for number in range(4 * CHUNK_ROWS):
        ttft_s, tokens = float(rng.gamma(2.0)), int(rng.integers(1_000, 120_000))
        session, now_s = number // 20 + int(rng.integers(40)), number * 0.3 + float(rng.random())
        calls.append(session, 0, number % 20, session % 3, session % 8, 0, 1, 1, 0, 0, 0, now_s, 0.0, ttft_s / 2, ttft_s, 3 * ttft_s,
                     tokens, tokens - 900, 0, 0, int(rng.integers(1_000)))  # fmt: skip
    assert calls.kept_bytes < 32 * len(calls)
