"""A run directory is complete or absent, holds everything of its records, and is the same bytes every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria.errors import InputError
from talaria.report.files import RunDirectory, StagedDirectory, read_run, rebuild_report, write_atomically
from talaria.report.record import RunRecord
from tests.report.synthetic import empty_record, plausible_record, small_record
from tests.report.test_document import small_document

TABLES = ["calls.parquet", "hbm.parquet", "rounds.parquet", "slots.parquet", "switches.parquet"]


def write(path: Path, *records: RunRecord, timeline: bool = False) -> Path:
    with RunDirectory(path, timeline=timeline) as directory:
        for record in records:
            directory.add(record)
        directory.finish(small_document(seeds=len(records)))
    return path


def test_a_run_directory_holds_the_files_of_the_contract(tmp_path: Path) -> None:
    path = write(tmp_path / "out", plausible_record(sessions=2), timeline=True)
    assert sorted(entry.name for entry in path.iterdir()) == sorted([*TABLES, "report.html", "run.json", "timeline.json"])


def test_the_same_run_gives_the_same_bytes_in_every_file(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, plausible_record(sessions=2), timeline=True) for name in ("one", "two"))
    for entry in one.iterdir():
        assert entry.read_bytes() == (two / entry.name).read_bytes(), entry.name


def test_the_report_rebuilt_from_its_directory_is_the_same_page(tmp_path: Path) -> None:
    path = write(tmp_path / "out", plausible_record(sessions=2), plausible_record(seed=1, sessions=2))
    before = (path / "report.html").read_bytes()
    (path / "report.html").unlink()
    assert rebuild_report(path).read_bytes() == before


def test_a_run_in_which_nothing_happened_still_has_a_page(tmp_path: Path) -> None:
    path = write(tmp_path / "out", empty_record())
    assert "Metrics" in (path / "report.html").read_text()
    assert len(read_run(path)[1][0].calls) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), RunDirectory(tmp_path / "out") as directory:
        directory.add(small_record())
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_keeps_the_earlier_output(tmp_path: Path) -> None:
    path = write(tmp_path / "out", small_record())
    before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
    with pytest.raises(KeyboardInterrupt), RunDirectory(path) as directory:
        directory.add(plausible_record(sessions=1))
        raise KeyboardInterrupt
    assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_new_run_replaces_an_earlier_one_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "out", small_record(), timeline=True)
    write(path, small_record())
    assert not (path / "timeline.json").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_empty_directory_is_used_and_missing_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (write(tmp_path / "empty", small_record()) / "run.json").exists()
    assert (write(tmp_path / "a" / "b", small_record()) / "run.json").exists()


def test_a_directory_with_foreign_files_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=r"holds 'thesis\.tex', which is no earlier output; allowed: .*; choose another --out"):
        StagedDirectory(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_file_in_the_way_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another --out"):
        StagedDirectory(tmp_path / "file" / below)


def test_a_file_written_atomically_is_whole_and_leaves_no_sibling(tmp_path: Path) -> None:
    write_atomically(tmp_path / "deep" / "plot.png", b"one")
    write_atomically(tmp_path / "deep" / "plot.png", b"two")
    assert [(entry.name, entry.read_bytes()) for entry in (tmp_path / "deep").iterdir()] == [("plot.png", b"two")]


def test_a_directory_that_is_missing_or_damaged_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no directory"):
        read_run(tmp_path / "none")
    path = write(tmp_path / "out", small_record())
    (path / "calls.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(InputError, match=r"calls\.parquet: cannot be read"):
        read_run(path)
    (path / "calls.parquet").unlink()
    with pytest.raises(InputError, match=r"calls\.parquet: cannot be read"):
        read_run(path)
