"""A paused scheduler sleeps instead of spinning: otherwise every parked engine costs a core per rank."""

from __future__ import annotations

import time
from typing import Any, Final

from talaria.gpu import compat, seams

_SLEEP_S: Final = 5e-3


def _sleep(_result: Any, *_arguments: Any, **_named: Any) -> None:
    time.sleep(_SLEEP_S)


HOOKS: Final = (compat.Hook(seams.PAUSED, "after", _sleep),)
