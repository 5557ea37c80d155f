"""The page stands alone, says everything the document says, and a real browser shows it."""

from __future__ import annotations

import html
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from talaria.report.html import render
from talaria.report.metrics import METRICS
from talaria.report.tables import number
from tests.report.synthetic import plausible_record, small_record
from tests.report.test_document import small_document

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZE = (1100, 900)


@pytest.fixture(scope="module")
def page() -> str:
    return render(small_document(), [plausible_record(sessions=3), plausible_record(seed=1, sessions=3)])


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs a headless browser: none of {', '.join(BROWSERS)} is installed")
    return found


def run_browser(browser: str, folder: Path, *flags: str) -> str:
    """What a fresh headless browser prints for ``folder``/report.html, cut off from any network."""
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--virtual-time-budget=5000")
    isolated = ("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}")
    command = [browser, *quiet, *isolated, *flags, (folder / "report.html").as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def pixels(png: bytes) -> tuple[tuple[int, int], set[bytes]]:
    """Size and the distinct unfiltered scanlines of a PNG: a blank page has one or two."""
    size = struct.unpack(">II", png[16:24])
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw = zlib.decompress(data)
    stride = len(raw) // size[1]
    return (size[0], size[1]), {raw[row * stride : (row + 1) * stride] for row in range(size[1])}


def test_every_metric_stands_with_its_value_and_its_definition(page: str) -> None:
    text = html.unescape(page)
    document = small_document()
    for name, metric in METRICS.items():
        assert re.search(rf'<td class="name">{name}</td>.*>{re.escape(number(document["metrics"][name]))}<', text), name
        assert metric.doc in text


def test_policy_workload_and_provenance_are_shown(page: str) -> None:
    for shown in ("tau", "how long a completed call reserves", "spill", "profiles · paper-tp8", "0123456789ab", "by-hand"):
        assert shown in page


def test_the_page_asks_for_nothing_from_outside(page: str) -> None:
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "@import" not in page and "<script" not in page and "url(" not in page


def test_names_from_a_trace_cannot_break_the_page() -> None:
    document = small_document()
    document["trace"] = {"name": "<script>alert(1)</script>"}
    assert "<script>" not in render(document, [])


def test_only_figures_with_data_are_drawn(page: str) -> None:
    assert page.count("<figure>") == 4
    assert render(small_document(), [small_record()]).count("<figure>") == 3  # no memory samples
    assert render(small_document(), []).count("<figure>") == 0


def test_a_browser_shows_the_page(page: str, browser: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    shot = tmp_path / "page.png"
    seen = run_browser(browser, tmp_path, "--dump-dom", f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={shot}")
    assert seen.count("<figure>") == 4
    assert all(f">{name}<" in seen for name in METRICS)
    size, lines = pixels(shot.read_bytes())
    assert size == SIZE
    assert len(lines) > SIZE[1] // 4
