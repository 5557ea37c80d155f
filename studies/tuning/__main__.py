"""``python -m studies.tuning [knobs|robustness|capacity|all] [TRACE...]``: rebuilds ``results/``.

TRACEs are talaria.trace/1 files of real sessions (``talaria-sim trace import``); ``knobs`` takes them beside the scenarios.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import optuna

from studies.tuning import capacity, knobs, robustness
from studies.tuning.common import with_trace
from talaria.sim import scenario as scenarios
from talaria.sim.parallel import Pool

TUNED = ("paper-tp8", "paper-tp4-high", "paper-tp4-tau", "four-by-five")
ROBUST = ("paper-tp8", "paper-tp4-high", "paper-tp4-tau")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", default="all", choices=["all", "knobs", "robustness", "capacity"])
    parser.add_argument("traces", nargs="*", type=Path)
    asked = parser.parse_args()
    if missing := [str(path) for path in asked.traces if not path.is_file()]:
        parser.error(f"{missing[0]} is no file")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    loaded = {name: scenarios.load(name) for name in TUNED}
    tuned = [*loaded.values(), *map(with_trace, asked.traces)]
    studies: dict[str, Callable[[Pool], None]] = {
        "knobs": lambda pool: knobs.main(tuned, pool),
        "robustness": lambda pool: robustness.main([loaded[name] for name in ROBUST], pool),
        "capacity": lambda pool: capacity.main(loaded["four-by-five"], pool),
    }
    with Pool(10_000) as pool:
        for name, study in studies.items():
            if asked.study in ("all", name):
                began_s = time.perf_counter()
                study(pool)
                print(f"{name}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
