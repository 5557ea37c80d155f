"""The decision log: every input of the router and the slot schedulers, and what they answered, one JSON object a line.

The first line is the header; it rebuilds the policies. Values are written by ``policy/codec.py``, so that
the same inputs can be fed through the policy again and must get the same answers (DESIGN, "One call's way through"). Both
worlds write it; ``talaria-sim replay-decisions`` reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from talaria.errors import InputError
from talaria.policy.codec import CODEC, Json
from talaria.policy.instance import Command, EngineView, Event
from talaria.policy.knobs import Knobs

SCHEMA = "talaria.decisions/1"


class RouterLog(Protocol):
    """Where a router's decisions go: a ``DecisionLog``, or what carries them to one in another process."""

    def router(self, method: str, arguments: Sequence[Any], result: Any, now_s: float) -> None: ...


def router_record(method: str, arguments: Sequence[Any], result: Any, now_s: float) -> dict[str, Json]:
    """One call of a router's method and its answer."""
    encoded = [CODEC.encode(argument) for argument in arguments]
    return {"who": "router", "do": method, "now_s": now_s, "args": encoded, "out": CODEC.encode(result)}


def slots_record(instance: str, event: Event, view: EngineView, now_s: float, commands: Sequence[Command]) -> dict[str, Json]:
    """One step of the slot scheduler of ``instance``."""
    encoded = [CODEC.encode(command) for command in commands]
    inputs = {"event": CODEC.encode(event), "view": CODEC.encode(view)}
    return {"who": "slots", "instance": instance, "now_s": now_s, **inputs, "commands": encoded}


def slots_knobs_record(instance: str, knobs: Knobs, now_s: float) -> dict[str, Json]:
    """The slot scheduler of ``instance`` was given other knobs; it commands nothing."""
    return {"who": "slots", "instance": instance, "now_s": now_s, "knobs": CODEC.encode(knobs), "commands": []}


def as_line(record: dict[str, Json]) -> str:
    """A record as the log writes it, without the line's end."""
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class DecisionLog:
    """Writes a log that appears under ``path`` when it is complete: on ``close``, or at the end of a ``with`` block that did not fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._file = self._part.open("w", encoding="utf-8", newline="\n")

    def header(
        self,
        *,
        scenario: str,
        config: str,
        seed: int,
        router: str,
        router_arguments: Mapping[str, Any],
        slots_arguments: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """First line: how to build the policies again.

        ``router`` is a name of ``policy.router.ROUTERS`` and ``router_arguments`` its keyword arguments; ``slots_arguments``
        has, by instance id, the keyword arguments of that instance's ``SlotScheduler``.
        """
        slots = {instance: _encode_arguments(arguments) for instance, arguments in slots_arguments.items()}
        policies = {"router": {"name": router, "arguments": _encode_arguments(router_arguments)}, "slots": slots}
        self._write({"schema": SCHEMA, "scenario": scenario, "config": config, "seed": seed, **policies})

    def router(self, method: str, arguments: Sequence[Any], result: Any, now_s: float) -> None:
        """The router's ``method`` was called with these positional arguments (all of them, the time included) and returned ``result``."""
        self._write(router_record(method, arguments, result, now_s))

    def slots(self, instance: str, event: Event, view: EngineView, now_s: float, commands: Sequence[Command]) -> None:
        """The slot scheduler of ``instance`` stepped. To be called before the host acts on the commands: the view changes then."""
        self._write(slots_record(instance, event, view, now_s, commands))

    def line(self, text: str) -> None:
        """A record that another process wrote in this very form, without its line's end."""
        self._file.write(f"{text}\n")

    def close(self) -> None:
        """Complete: the log appears under its name."""
        self._file.close()
        self._part.replace(self.path)

    def discard(self) -> None:
        """Leave nothing behind."""
        try:
            self._file.close()
        finally:
            self._part.unlink(missing_ok=True)

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(as_line(record))
        self._file.write("\n")


def _encode_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: CODEC.encode(value) for name, value in arguments.items()}


def read_log(path: Path) -> Iterator[tuple[int, Json]]:
    """(line number, record) of a log, the header first. Raises InputError with file and line where it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    what = f"is no JSON: {error.msg}" if line.endswith("\n") else "the log breaks off in the middle of a record"
                    raise InputError(what, where=f"{path}:{number}", allowed="one JSON object a line") from None
                except RecursionError:
                    raise InputError("is nested too deeply", where=f"{path}:{number}", allowed="one JSON object a line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path), allowed=f"a decision log ({SCHEMA}, JSONL in UTF-8)") from None
