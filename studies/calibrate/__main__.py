"""``python -m studies.calibrate fit|again|show|apply TESTBED``."""

from __future__ import annotations

import argparse
import sys
import time

from studies.calibrate import report, search, shipped, testbeds
from studies.calibrate.testbed import Testbed
from talaria.errors import InputError


def fit(testbed: Testbed, trials: int, rounds: int) -> None:
    """Search from the declared starts, polish, and leave the result file."""
    draft = testbed.draft()
    began = time.perf_counter()
    values = search.search(testbed, draft, trials, _say)
    if rounds:
        values = search.polish(testbed, draft, values, rounds, _say)
    _finish(testbed, values, began)


def _finish(testbed: Testbed, values: dict[str, float], began: float) -> None:
    result = report.document(testbed, testbed.draft(), values)
    report.save(result)
    print(report.table(result))
    _say(f"{time.perf_counter() - began:.0f} s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, meaning in (
        ("fit", "search, polish, and write results/TESTBED.json"),
        ("again", "sensitivities and residuals of results/TESTBED.json anew, at its values"),
        ("show", "print results/TESTBED.json"),
        ("apply", "write its values into the shipped profile and scenarios"),
    ):
        command = commands.add_parser(name, help=meaning)
        command.add_argument("testbed", choices=testbeds.NAMES)
        if name == "fit":
            command.add_argument("--trials", type=int, default=60, help="a quarter by TPE, the rest by CMA-ES (default: 60)")
            command.add_argument("--rounds", type=int, default=2, help="gradients of the polish, 0 for none (default: 2)")
    arguments = parser.parse_args()
    if arguments.command == "fit" and (arguments.trials < search.LEAST_TRIALS or arguments.rounds < 0):
        parser.error(f"--trials is from {search.LEAST_TRIALS}, --rounds from 0")
    try:
        _run(arguments, testbeds.load(arguments.testbed))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace, testbed: Testbed) -> None:
    if arguments.command == "fit":
        fit(testbed, arguments.trials, arguments.rounds)
    elif arguments.command == "again":
        _finish(testbed, report.values_of(report.load(testbed.name)), time.perf_counter())
    elif arguments.command == "show":
        print(report.table(report.load(testbed.name)))
    else:
        shipped.write(testbed, report.values_of(report.load(testbed.name)))


if __name__ == "__main__":
    sys.exit(main())
