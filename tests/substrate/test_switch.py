"""What a switch has to do, and how the ranks' records become the logical one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.substrate.layout import BumpLayout, ModelMemory, Regions
from talaria.substrate.prefix import PrefixForest
from talaria.substrate.registry import HostRegistry
from talaria.substrate.staging import StagingMap
from talaria.substrate.switch import PATHS, PHASES, SwitchPlan, SwitchRecord, merge_ranks, plan_switch

LAYOUT = BumpLayout(2000, 2000)
TARGET = ModelMemory("b", weight_bytes=160, kv_page_bytes=10)
REGIONS = LAYOUT.regions(TARGET)


def plan(staging: StagingMap | None = None, captured: Regions | None = REGIONS, source: str | None = "a") -> SwitchPlan:
    registry = HostRegistry(0)
    return plan_switch(source, "b", 160, registry=registry, staging=staging, captured=captured, regions=REGIONS)


def staging_for(target: str, nbytes: int) -> StagingMap:
    staging = StagingMap(2, 40, 100, 10)
    staging.begin(target, 160, 0)
    staging.advance(nbytes)
    return staging


def test_the_path_follows_what_is_staged_clean() -> None:
    for nbytes, path in ((160, "d2d"), (120, "partial"), (30, "h2d")):
        made = plan(staging_for("b", nbytes))
        assert made.path == path and made.gather is not None and made.cancel_staging_of is None
        assert made.d2d_bytes + made.h2d_bytes == 160


def test_without_staging_every_byte_comes_from_the_host() -> None:
    made = plan()
    assert (made.path, made.d2d_bytes, made.h2d_bytes, made.gather) == ("h2d", 0, 160, None)


def test_staging_of_another_model_is_cancelled() -> None:
    made = plan(staging_for("c", 160))
    assert (made.path, made.cancel_staging_of) == ("h2d", "c")


def test_an_absent_model_is_opened_in_full() -> None:
    made = plan(staging_for("b", 160), captured=None)
    assert (made.path, made.h2d_bytes, made.reuse_graphs, made.reuse_kv_shell) == ("open", 160, False, False)
    assert made.cancel_staging_of == "b"


def test_graphs_are_recaptured_and_shells_rebuilt_where_addresses_moved() -> None:
    assert plan().reuse_graphs and plan().reuse_kv_shell
    moved = LAYOUT.regions(replace(TARGET, weight_bytes=170))
    assert not plan(captured=moved).reuse_graphs and not plan(captured=moved).reuse_kv_shell
    shorter = LAYOUT.regions(replace(TARGET, kv_page_bytes=1700))
    assert plan(captured=shorter).reuse_graphs and not plan(captured=shorter).reuse_kv_shell


def test_a_switch_drains_the_sources_copies_and_no_others() -> None:
    forest, registry = PrefixForest(), HostRegistry(1000, page_tokens=4)
    node = forest.new_root()
    forest.extend(node, 0, 8)
    a = registry.checkpoint("a", forest.spans(node, 8), 1, 0.0)
    c = registry.checkpoint("c", forest.spans(node, 8), 1, 0.0)
    assert a is not None and c is not None
    made = plan_switch("a", "b", 160, registry=registry, staging=None, captured=REGIONS, regions=REGIONS)
    assert made.drain == (a,)
    first = plan_switch(None, "b", 160, registry=registry, staging=None, captured=REGIONS, regions=REGIONS)
    assert first.drain == ()


RECORDS = st.builds(
    SwitchRecord,
    st.tuples(*[st.floats(0, 10) for _ in PHASES]),
    st.sampled_from(PATHS),
    st.integers(0, 100),
    st.integers(0, 100),
)


@given(st.lists(RECORDS, min_size=1, max_size=8))
def test_a_logical_switch_is_as_slow_as_its_slowest_rank_and_as_cold_as_its_worst(records: list[SwitchRecord]) -> None:
    logical = merge_ranks(records)
    assert logical.total_s == max(record.total_s for record in records) == sum(logical.phases_s)
    assert PATHS.index(logical.path) == max(PATHS.index(record.path) for record in records)
    assert logical.d2d_bytes == max(record.d2d_bytes for record in records)
    assert logical.h2d_bytes == max(record.h2d_bytes for record in records)


def test_a_switch_without_records_or_with_an_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="there is none"):
        merge_ranks([])
    with pytest.raises(ValueError, match="path='warm': allowed d2d, partial, h2d, open"):
        SwitchRecord((0.0, 0.0, 0.0, 0.0, 0.0), "warm", 0, 0)
