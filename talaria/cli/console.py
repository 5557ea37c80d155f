"""Where a command's words go: results to stdout, everything else to stderr, and a progress bar when it takes longer than two seconds."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

SHOW_AFTER_S = 2.0
PIPE_COLUMNS = 100


def note(text: str) -> None:
    """One line on stderr, beside the result."""
    print(text, file=sys.stderr)


def show(table: Any) -> None:
    """A rich renderable on stdout: as wide as the terminal, ``PIPE_COLUMNS`` wide in a file or pipe, without the padding of its box."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n"))


def show_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", wrapped: Collection[str] = ()) -> None:
    """A plain table on stdout, in which only the columns ``wrapped`` may take several lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in wrapped, overflow="fold")
    for row in rows:
        table.add_row(*row)
    show(table)


def show_json(document: Any) -> None:
    """A JSON document on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def show_document(document: Mapping[str, Any], table: Callable[[Any], Any], *, as_json: bool) -> None:
    """A run's, comparison's or sweep's document on stdout: as it is, or as the table that ``table`` makes of it."""
    from talaria.report.document import to_json

    if as_json:
        print(to_json(document), end="")
    else:
        show(table(document))


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Yields ``LateBar.advance``, to call once per finished item. On a terminal, a bar with the time left (if ``total`` is known)
    appears after two seconds."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    bar = LateBar(label, total)
    try:
        yield bar.advance
    finally:
        bar.close()


class LateBar:
    """Shows itself ``SHOW_AFTER_S`` after its making: rich is neither imported nor drawn in a run that is over by then."""

    def __init__(self, label: str, total: int | None) -> None:
        self._label, self._total = label, total
        self._done, self._closed = 0, False
        self._lock = threading.Lock()
        self._update: Callable[[int, str], None] | None = None
        self._stop: Callable[[], None] | None = None
        self._timer = threading.Timer(SHOW_AFTER_S, self.show)
        self._timer.daemon = True
        self._timer.start()

    def advance(self, label: str | None = None, done: int | None = None) -> None:
        """One more item is done, or ``done`` of them all; ``label`` is shown from now on."""
        with self._lock:
            self._done = self._done + 1 if done is None else done
            self._label = label or self._label
            if self._update:
                self._update(self._done, self._label)

    def close(self) -> None:
        """Take the bar away, or do not let it appear."""
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._stop:
                self._stop()

    def show(self) -> None:
        """Draw the bar with what is done so far."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with self._lock:
            if self._closed:
                return
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            task = bar.add_task(self._label, total=self._total, completed=self._done)
            bar.start()
            self._update = lambda done, label: bar.update(task, completed=done, description=label)
            self._stop = bar.stop
