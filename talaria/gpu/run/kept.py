"""What is finished of a replay of several policies, kept beside its output until all of it is: a broken replay goes on from there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from talaria.errors import InputError
from talaria.gpu.run.execute import Repetition
from talaria.report.files import write_atomically
from talaria.report.parquet import RecordWriter, read_records
from talaria.report.record import RunRecord
from talaria.report.timeline import write_timeline

INPUTS, DONE = "inputs.json", "done.json"


class Kept:
    """``directory`` is made anew, or with ``resume`` gone on with, if it is of the same ``inputs``. Raises InputError if not."""

    def __init__(self, directory: Path, inputs: dict[str, Any], *, resume: bool) -> None:
        self._directory = directory
        written = json.dumps(inputs, sort_keys=True, indent=1)
        if resume and directory.exists():
            try:
                same = (directory / INPUTS).read_bytes() == written.encode()
            except OSError as error:
                what = f"what is kept there is damaged ({INPUTS}: {error.strerror})"
                raise InputError(what, where=str(directory), fix="start again without --resume") from None
            if not same:
                what = "what is kept there is of another trace or of other options"
                raise InputError(what, where=str(directory), fix="start again without --resume")
            return
        shutil.rmtree(directory, ignore_errors=True)
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"cannot be written ({error.strerror})", where=str(directory), fix="choose another --out") from None
        write_atomically(directory / INPUTS, written.encode())

    def place(self, label: str, seed: int) -> Path:
        """Where a repetition's files are."""
        return self._directory / label / str(seed)

    def begin(self, label: str, seed: int) -> Path:
        """Its place, emptied of what a broken one left."""
        place = self.place(label, seed)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return place

    def finished(self, label: str, seed: int) -> tuple[RunRecord, dict[str, Any]] | None:
        """The record, without phases, and what ``keep`` was told of it; None where there is none yet."""
        place = self.place(label, seed)
        if not (place / DONE).exists():
            return None
        (record,) = read_records(place)
        return record, json.loads((place / DONE).read_text(encoding="utf-8"))

    def keep(self, label: str, seed: int, done: Repetition) -> None:
        """The repetition is finished, its decisions are in its place."""
        place = self.place(label, seed)
        tables = RecordWriter(place)
        tables.add(done.record)
        tables.close()
        write_timeline(done.record, place / "timeline.json")
        notes = {"began_s": done.began_s, "cpu_s": done.cpu_s, "differences": done.differences.count, "warnings": list(done.warnings)}
        write_atomically(place / DONE, json.dumps(notes).encode())

    def discard(self) -> None:
        """All of it is where it belongs."""
        shutil.rmtree(self._directory, ignore_errors=True)
