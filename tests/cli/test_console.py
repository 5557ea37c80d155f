"""The progress bar is late, counts what happened before it appeared, and stays off where nobody looks."""

from __future__ import annotations

import sys

import pytest

from talaria.cli import console


class Terminal:
    """stderr as a terminal that keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """To be called by the test itself: between a fixture and its test pytest puts its own stderr back."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    return screen


def test_a_short_batch_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(console, "SHOW_AFTER_S", 3600.0)
    with console.progress("simulating", 2) as advance:
        advance()
        advance()
    assert terminal.text == ""


def test_a_late_bar_counts_what_was_done_before_and_after_it_appeared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    bar = console.LateBar("simulating", 3)
    bar.advance()
    bar.show()
    bar.advance()
    bar.close()
    assert "simulating" in terminal.text and "2/3" in terminal.text


def test_a_bar_says_what_it_is_told_and_how_many_others_have_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    bar = console.LateBar("tuning", 9)
    bar.advance("tuning · best 5", 4)
    bar.show()
    bar.advance("tuning · best 3", 7)
    bar.close()
    assert "best 3" in terminal.text and "7/9" in terminal.text


def test_a_bar_whose_time_comes_after_the_end_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    bar = console.LateBar("simulating", 1)
    bar.close()
    bar.show()
    assert terminal.text == ""


def test_a_pipe_gets_no_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SHOW_AFTER_S", 0.0)
    with console.progress("simulating", 1) as advance:
        advance()
    assert capsys.readouterr().err == ""
