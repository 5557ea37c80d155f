"""A run directory is complete or absent, and is the same bytes every time."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from talaria.errors import InputError
from talaria.report.files import RunDirectory, StagedDirectory, read_run, rebuild_report, write_atomically
from talaria.report.record import RunRecord
from tests.report.synthetic import empty_record, plausible_record, small_record
from tests.report.test_document import small_document

TABLES = ["calls.parquet", "hbm.parquet", "rounds.parquet", "slots.parquet", "switches.parquet"]


def write(path: Path, *records: RunRecord) -> Path:
    with RunDirectory(path, timeline=True) as directory:
        for record in records:
            directory.add(record)
        directory.finish(small_document(seeds=len(records)))
    return path


def stage(path: Path, **contents: str) -> Path:
    """Make ``path`` hold exactly the files ``contents``, given by stem of a JSON file."""
    with StagedDirectory(path) as directory:
        for stem, text in contents.items():
            (directory.staging / f"{stem}.json").write_text(text)
        directory.commit()
    return path


def held(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in sorted(path.iterdir())}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("finished") / "out", plausible_record(sessions=2), plausible_record(seed=1, sessions=2))


def test_a_run_directory_holds_the_files_of_the_contract(finished: Path) -> None:
    assert list(held(finished)) == sorted([*TABLES, "report.html", "run.json", "timeline.json"])


def test_the_same_run_gives_the_same_bytes_in_every_file(finished: Path, tmp_path: Path) -> None:
    again = write(tmp_path / "out", plausible_record(sessions=2), plausible_record(seed=1, sessions=2))
    assert held(again) == held(finished)


def test_the_report_rebuilt_from_its_directory_is_the_same_page(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / "report.html").unlink()
    assert rebuild_report(copy) == copy / "report.html"
    assert held(copy) == held(finished)


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
    path = stage(tmp_path / "out", run="earlier")
    with pytest.raises(KeyboardInterrupt), RunDirectory(path) as directory:
        directory.add(small_record())
        raise KeyboardInterrupt
    assert held(path) == {"run.json": b"earlier"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_new_output_replaces_an_earlier_one_whole(tmp_path: Path) -> None:
    path = stage(tmp_path / "out", run="one", timeline="one")
    assert held(stage(path, run="two")) == {"run.json": b"two"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_empty_directory_is_used_and_missing_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert held(stage(tmp_path / "empty", run="one")) == {"run.json": b"one"}
    assert held(stage(tmp_path / "a" / "b", run="one")) == {"run.json": b"one"}


def test_a_relative_path_and_a_trailing_slash_name_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stage(Path("out"), run="one")
    stage(Path("./out/"), run="two")
    assert held(tmp_path / "out") == {"run.json": b"two"}


def test_a_directory_with_foreign_files_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=r"holds 'thesis\.tex', which is no earlier output; allowed: .*; choose another --out"):
        StagedDirectory(tmp_path)
    assert held(tmp_path) == {"thesis.tex": b"precious"}


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_file_in_the_way_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another --out"):
        StagedDirectory(tmp_path / "file" / below)


def test_a_file_written_atomically_is_whole_and_leaves_no_sibling(tmp_path: Path) -> None:
    write_atomically(tmp_path / "deep" / "plot.png", b"one")
    write_atomically(tmp_path / "deep" / "plot.png", b"two")
    assert held(tmp_path / "deep") == {"plot.png": b"two"}


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no directory"):
        read_run(tmp_path / "none")


def test_a_damaged_or_missing_table_is_refused_by_name(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / "calls.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(InputError, match=r"calls\.parquet: cannot be read"):
        read_run(copy)
    (copy / "calls.parquet").unlink()
    with pytest.raises(InputError, match=r"calls\.parquet: cannot be read"):
        read_run(copy)


def commit_often(path: str, number: int) -> None:
    for _ in range(50):
        with StagedDirectory(path) as directory:
            (directory.staging / "run.json").write_text(str(number))
            directory.commit()


def test_runs_into_one_directory_at_once_take_turns_and_leave_one_of_them(tmp_path: Path) -> None:
    threads = ThreadPoolExecutor(4)
    for done in [threads.submit(commit_often, str(tmp_path / "out"), number) for number in range(4)]:
        done.result()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "run.json").read_text() in "0123"
