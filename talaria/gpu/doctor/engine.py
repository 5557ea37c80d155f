"""What the engine's own interpreter says: its SGLang, whether our hooks fit it, which parsers it knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

from talaria.gpu.config import Engine
from talaria.gpu.protocol import memory
from talaria.gpu.protocol.engine import SOCKET_VARIABLE

PROBE_S = 300.0
PROBE = (
    "import json\nfrom talaria.gpu import compat, plugin\nplugin.load()\n"
    "print('talaria-probe ' + json.dumps({'version': compat.version(), 'tested': compat.TESTED_VERSION, **compat.parsers()}))"
)
MARK = "talaria-probe "


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """``error`` is empty where the interpreter has an SGLang that the hooks fit."""

    version: str = ""
    tested: str = ""
    tool_parsers: tuple[str, ...] = ()
    reasoning_parsers: tuple[str, ...] = ()
    error: str = ""
    python: str = field(default=sys.executable)


def ask(engine: Engine) -> EngineFacts:
    """Takes as long as SGLang's imports do."""
    python = engine.python or sys.executable
    environment = {**os.environ, **engine.environment, SOCKET_VARIABLE: "/nonexistent", memory.SOCKET_VARIABLE: "/nonexistent"}
    try:
        asked = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, errors="replace", timeout=PROBE_S, env=environment)
    except (OSError, subprocess.SubprocessError) as error:
        return EngineFacts(error=f"cannot be run: {error}", python=python)
    said = next((line for line in asked.stdout.splitlines() if line.startswith(MARK)), None)
    if said is None:
        lines = asked.stderr.strip().splitlines()
        return EngineFacts(error=lines[-1][:300] if lines else f"ends with code {asked.returncode}", python=python)
    facts = json.loads(said.removeprefix(MARK))
    return EngineFacts(facts["version"], facts["tested"], tuple(facts["tool_parser"]), tuple(facts["reasoning_parser"]), "", python)
