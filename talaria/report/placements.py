"""Why each call of a session went where it went, read from a run's decision log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from talaria.errors import InputError, unknown_name
from talaria.policy.calls import Call
from talaria.policy.codec import CODEC, CodecError
from talaria.policy.explain import Explanation
from talaria.report.declog import read_log


def placements(path: Path, session: str, turn: int | None = None) -> Iterator[tuple[Call, Explanation]]:
    """The explained placements of ``session`` in order, all its lines, or those at ``turn``.

    Raises InputError for a log that cannot be read, and with the nearest name where it has no such session or turn.
    """
    sessions: set[str] = set()
    turns: set[int] = set()
    for number, record in read_log(path):
        if record.get("do") != "explain":
            continue
        try:
            call, explanation = CODEC.decode(record["args"])[0], CODEC.decode(record["out"])
        except (CodecError, KeyError, IndexError) as error:
            what = f"is no explained placement: {error}"
            raise InputError(what, where=f"{path}:{number}", fix="write the log again with this version") from None
        sessions.add(call.key.session)
        if call.key.session == session:
            turns.add(call.turn)
            if turn in (None, call.turn):
                yield call, explanation
    if not sessions:
        raise InputError("explains no placement", where=str(path), fix="run again with --out DIR --decisions")
    if session not in sessions:
        raise unknown_name("session", session, sessions, where=str(path))
    if turn is not None and turn not in turns:
        allowed = f"turns {min(turns)} to {max(turns)}"
        raise InputError(f"session {session!r} has no turn {turn}", where=str(path), allowed=allowed)
