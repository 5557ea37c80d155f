"""``talaria-gpu``: the commands that drive real engines."""

from __future__ import annotations

from talaria.cli.program import Program

COMMANDS = {
    "doctor": "talaria.cli.gpu.doctor",
    "serve": "talaria.cli.gpu.serve",
    "run": "talaria.cli.gpu.run",
    "profile": "talaria.cli.gpu.profile",
    "validate": "talaria.cli.gpu.validate",
}

_PROGRAM = Program(
    "talaria-gpu",
    COMMANDS,
    "Serve several large models to agents on shared GPU groups: check a machine, serve, replay traces, measure, validate.\n\n"
    "Start with: talaria-gpu doctor CLUSTER",
    extra=("serve", frozenset({"aiohttp", "msgspec", "prometheus_client", "uvloop", "zmq"})),
)

main = _PROGRAM.main
run_command = _PROGRAM.run_command
