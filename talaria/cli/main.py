"""``talaria-sim``: the simulator's commands."""

from __future__ import annotations

from talaria.cli.program import Program

COMMANDS = {
    "run": "talaria.cli.run",
    "compare": "talaria.cli.compare",
    "sweep": "talaria.cli.sweep",
    "tune": "talaria.cli.tune",
    "reproduce": "talaria.cli.reproduce",
    "trace": "talaria.cli.trace",
    "profile": "talaria.cli.profile",
    "scenarios": "talaria.cli.listing",
    "configs": "talaria.cli.listing",
    "knobs": "talaria.cli.listing",
    "replay-decisions": "talaria.cli.replay",
    "report": "talaria.cli.report",
}

_PROGRAM = Program(
    "talaria-sim",
    COMMANDS,
    "Simulate session-aware serving of several large models to agents: run, compare, sweep, tune.\n\nStart with: talaria-sim sweep tau",
)

main = _PROGRAM.main
run_command = _PROGRAM.run_command
