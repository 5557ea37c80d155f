"""The run directory: everything that a run leaves on disk, complete or not there at all.

Files are written into a hidden sibling directory that takes the target's name in one rename, so an error or an interrupt
leaves no half-written directory behind.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from talaria.errors import InputError
from talaria.report.document import Document, for_file, to_json
from talaria.report.parquet import RecordWriter, read_records
from talaria.report.record import RunRecord
from talaria.report.schema import read_run_document

OUR_FILES = (
    "*.parquet", "run.json", "compare.json", "sweep.json", "reproduce.json", "validation.json", "report.html", "timeline.json",
    "decisions.jsonl", "*.png",
)  # fmt: skip
"""What a directory may hold to be replaced by a new one; anything else in it belongs to somebody."""


class StagedDirectory:
    """A directory that appears at ``path`` as a whole when ``commit`` is called, and never if it is not.

    Used as a context manager; until then files go into ``staging``. An earlier output at ``path`` is replaced. Raises
    InputError at once if ``path`` is a file, holds files that are not an earlier output, or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        _check_replaceable(Path(path))
        self.path = Path(path).resolve()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.staging = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent))
        except OSError as error:
            raise InputError(f"cannot be written ({error.strerror})", where=str(path), fix="choose another --out") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)

    def commit(self) -> None:
        """Rename the staged files into place; what was at ``path`` is gone afterwards, or still there if this fails."""
        self.staging.chmod(0o777 & ~_umask())
        with _turn_in(self.path.parent):
            if not self.path.exists():
                self.staging.rename(self.path)
                return
            previous = self.staging.with_suffix(".previous")
            self.path.rename(previous)
            try:
                self.staging.rename(self.path)
            except BaseException:
                previous.rename(self.path)
                raise
        shutil.rmtree(previous)


class RunDirectory(StagedDirectory):
    """``run.json``, the tables, ``report.html`` and on request ``timeline.json`` of one or more seeds of one run.

    ``add`` each seed's record as it ends, then ``finish`` with the document of the seeds that were added. The timeline
    shows the first seed.
    """

    def __init__(self, path: str | Path, *, timeline: bool = False) -> None:
        super().__init__(path)
        self._timeline = timeline
        self._tables = RecordWriter(self.staging)
        self._records: list[RunRecord] = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._tables.close()
        finally:
            super().__exit__(kind, error, trace)

    def add(self, record: RunRecord) -> None:
        """Write one seed's rows. Seeds are added in the order of the document's ``seeds``."""
        if self._timeline and not self._records:
            from talaria.report.timeline import write_timeline

            write_timeline(record, self.staging / "timeline.json")
        self._tables.add(record)
        self._records.append(record)

    def finish(self, document: Document) -> None:
        """Write the documents and make the directory appear. ``document`` is ``talaria.run/1``; ``host`` is left out."""
        from talaria.report.html import render

        kept = for_file(document)
        self._tables.close()
        (self.staging / "run.json").write_text(to_json(kept), encoding="utf-8")
        (self.staging / "report.html").write_text(render(kept, self._records), encoding="utf-8")
        self.commit()


def read_run(directory: str | Path) -> tuple[Document, list[RunRecord]]:
    """The document and the records (without phases) of a run directory, checked. Raises InputError."""
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError("is no directory", where=str(directory), allowed="a directory that `talaria-sim run --out DIR` wrote")
    return read_run_document(directory / "run.json"), read_records(directory)


def rebuild_report(directory: str | Path) -> Path:
    """Write ``report.html`` of an existing run directory anew from its other files; returns its path. Raises InputError."""
    from talaria.report.html import render

    document, records = read_run(directory)
    path = Path(directory) / "report.html"
    write_atomically(path, render(document, records).encode())
    return path


def check_writable(path: Path) -> None:
    """Before hours of work whose result is to lie at ``path``. Raises InputError if it cannot be written."""
    handle, name = _beside(path)
    os.close(handle)
    os.unlink(name)


def _beside(path: Path) -> tuple[int, str]:
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    except OSError as error:
        raise InputError(f"cannot be written ({error.strerror})", where=str(path), fix="choose another place") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write one file so that it is there complete, or as it was before. Raises InputError if it cannot be written."""
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together: each is there complete, and where one cannot be written all are as before. Raises InputError."""
    staged: dict[Path, str] = {}
    try:
        for path, content in contents.items():
            handle, staged[path] = _beside(path)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(staged[path]).chmod(0o666 & ~_umask())
        for path, name in staged.items():
            os.replace(name, path)
    finally:
        for name in staged.values():
            Path(name).unlink(missing_ok=True)


@contextmanager
def _turn_in(directory: Path) -> Iterator[None]:
    """One commit into ``directory`` at a time: several runs may have been given the same --out, and the last one is to win."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _check_replaceable(path: Path) -> None:
    try:
        held = os.listdir(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise InputError("exists and is no directory", where=str(path), fix="choose another --out") from None
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path), fix="choose another --out") from None
    foreign = sorted(name for name in held if not _is_ours(path / name, held))
    if foreign:
        raise InputError(
            f"holds {foreign[0]!r}, which is no earlier output",
            where=str(path),
            allowed="a new or empty directory, or an earlier output to replace",
            fix="choose another --out",
        )


def _is_ours(entry: Path, beside: list[str]) -> bool:
    """A file of an output, or a run directory of a comparison."""
    if any(fnmatch.fnmatch(entry.name, known) for known in OUR_FILES):
        return True
    if "compare.json" not in beside or not (entry / "run.json").is_file():
        return False
    return all(any(fnmatch.fnmatch(name, known) for known in OUR_FILES) for name in os.listdir(entry))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
