"""What ranks say of a switch, as one switch."""

from __future__ import annotations

import time

from talaria.gpu.engine.switch import of_ranks
from talaria.gpu.memory.arenas import RankTimes
from talaria.substrate.switch import SwitchRecord


def rank(total_s: float, path: str, d2d_bytes: int, h2d_bytes: int, dirty_bytes: int = 0) -> RankTimes:
    fifth_s = total_s / 5
    return RankTimes(SwitchRecord((fifth_s, fifth_s, fifth_s, fifth_s, fifth_s), path, d2d_bytes, h2d_bytes), dirty_bytes)


def test_a_switch_is_as_slow_as_its_slowest_rank_and_as_cold_as_its_coldest() -> None:
    began_s = time.monotonic() - 10.0
    times = of_ranks(began_s, [rank(5.0, "d2d", 100, 0), rank(4.0, "partial", 60, 40, dirty_bytes=30)])
    assert (times.path, times.d2d_bytes, times.h2d_bytes) == ("partial", 100, 40)
    assert (times.coverage, times.dirty) == (0.6, 0.3)
    assert times.phases_s[:4] == (1.0, 1.0, 1.0, 1.0)


def test_what_no_rank_accounts_for_counts_as_publishing() -> None:
    began_s = time.monotonic() - 10.0
    times = of_ranks(began_s, [rank(5.0, "h2d", 0, 7)])
    assert times.phases_s[4] > 5.9
    ahead = of_ranks(time.monotonic() + 10.0, [rank(5.0, "h2d", 0, 7)])
    assert sum(ahead.phases_s) == 5.0
