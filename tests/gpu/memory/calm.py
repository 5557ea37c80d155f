"""What an engine says that has its memory for itself and never switches."""

from __future__ import annotations

from pathlib import Path

from talaria.gpu import config
from tests.gpu.memory.pooled import pooled
from tests.gpu.memory.shared import Call


async def unlike(settings: config.Engine, model: Path, directory: Path, tp: int, calls: list[Call]) -> list[int]:
    """Which of the calls such an engine answers otherwise, one at a time; nothing ever comes back to it from the host."""
    directory.mkdir()
    found = []
    async with pooled(settings, model, directory, tp) as engine:
        for number, (prompt, output) in enumerate(calls):
            status, said = await engine.generate(prompt, len(output))
            assert status == 200 and not (said["meta_info"].get("cached_tokens_details") or {}).get("host", 0), said
            if said["output_ids"] != output:
                found.append(number)
    return found
