"""Rebuilds every shipped profile: ``python -m studies.profiles.build ENTRIES``, where ENTRIES is a file of latency points
as aiconfigurator-core reports them. The fits and their residuals end up in the profiles; the points do not. What a calibration
has found (``studies/calibrate/results``) takes the place of what the two published testbeds had before.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from studies.calibrate.testbeds import calibrated
from studies.profiles import paper, systems
from talaria.errors import InputError
from talaria.profiles.load import DATA
from talaria.profiles.points import read_entries
from talaria.profiles.profile import resolve
from talaria.profiles.schema import ProfileFile
from talaria.report.files import write_atomically
from talaria.validation import parse


def build(entries: Path) -> list[ProfileFile]:
    """All shipped profiles. Raises InputError if ``entries`` is unreadable or does not determine a curve."""
    document = read_entries(entries)
    b200 = parse(ProfileFile, systems.b200(document), "b200")
    like = resolve(b200).models
    others = [systems.h200(document), calibrated(paper.tp8(like)), calibrated(paper.tp4(like))]
    return [b200, *(parse(ProfileFile, other, str(other["name"])) for other in others)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entries", type=Path)
    parser.add_argument("--out", type=Path, default=DATA, help="folder for the profiles (default: the shipped ones)")
    arguments = parser.parse_args()
    try:
        for file in build(arguments.entries):
            write_atomically(arguments.out / f"{file.name}.json", file.text().encode())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
