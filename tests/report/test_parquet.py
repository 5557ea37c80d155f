"""Records survive the way through Parquet, and the tables say by name what the record says by number."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from talaria.report.columns import Columns
from talaria.report.metrics import metrics
from talaria.report.parquet import FLAG_COLUMNS, RecordWriter, read_records
from talaria.report.record import NO_INSTANCE, RunRecord
from tests.report.synthetic import add_call, empty_record, plausible_record, small_record


def write(path: Path, *records: RunRecord) -> Path:
    writer = RecordWriter(path)
    for record in records:
        writer.add(record)
    writer.close()
    return path


def rows(columns: Columns) -> list[tuple[object, ...]]:
    return list(zip(*(columns[name].tolist() for name in columns.names), strict=True))


def test_records_read_back_equal_the_ones_written(tmp_path: Path) -> None:
    written = [small_record(), plausible_record(seed=1, sessions=3)]
    written[1].models, written[1].instances = (*written[0].models, "gamma"), written[0].instances
    read = read_records(write(tmp_path, *written))
    for before, after in zip(written, read, strict=True):
        assert metrics(after) == metrics(before)
        for table in ("calls", "rounds", "slots", "switches"):
            assert rows(getattr(after, table)) == rows(getattr(before, table))
        assert (after.seed, after.models, after.session_parents) == (before.seed, before.models, before.session_parents)


def test_a_run_without_any_row_reads_back(tmp_path: Path) -> None:
    (read,) = read_records(write(tmp_path, empty_record()))
    assert len(read.calls) == 0
    assert read.session_names == []


def test_calls_carry_names_absolute_times_and_both_kinds_of_ttft(tmp_path: Path) -> None:
    table = pq.read_table(write(tmp_path, small_record()) / "calls.parquet").to_pylist()
    first = next(row for row in table if row["session_name"] == "first")
    assert (first["model"], first["instance"], first["outcome"], first["reason"]) == ("alpha", "cold-0", "completed", "cost")
    # Enqueued at 10 s, placed after 0.5 s, admitted after 1 s, first token after 2 s, last after 4 s.
    assert [first[name] for name in ("placed_at_s", "admitted_at_s", "first_token_at_s", "ended_at_s")] == [10.5, 11.0, 12.0, 14.0]
    assert (first["ttft_s"], first["ttft_local_s"]) == (2.0, 1.5)
    assert first["opens_model"] and not first["is_return"]


def test_a_call_that_was_never_placed_has_no_instance(tmp_path: Path) -> None:
    record = empty_record()
    add_call(record, 0, 0, 1.0, 0.0, 0.0, outcome="shed", instance=NO_INSTANCE)
    path = write(tmp_path, record)
    assert pq.read_table(path / "calls.parquet")["instance"].to_pylist() == [None]
    assert read_records(path)[0].calls["instance"].tolist() == [NO_INSTANCE]


def test_memory_samples_survive_where_they_were_taken(tmp_path: Path) -> None:
    record = plausible_record(sessions=1)
    (read,) = read_records(write(tmp_path, record))
    assert record.hbm_samples is not None and read.hbm_samples is not None
    assert rows(read.hbm_samples) == rows(record.hbm_samples)


def test_memory_samples_are_absent_where_none_were_taken(tmp_path: Path) -> None:
    assert read_records(write(tmp_path, small_record()))[0].hbm_samples is None


@given(st.integers(0, 255))
def test_flags_spelled_out_are_the_flags(bits: int) -> None:
    assert sum(flag for flag in FLAG_COLUMNS.values() if bits & flag) == bits
