"""Where the regions of the managed buffer lie, when graphs survive a switch, and what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.substrate.layout import BumpLayout, LayoutError, ModelMemory

MODEL = ModelMemory("a", weight_bytes=300, kv_page_bytes=7, runtime_bytes=50, graph_pool_bytes=30, residue_bytes=20)


@given(
    st.integers(1, 5000), st.integers(1, 3000), st.integers(1, 100), st.integers(0, 500), st.integers(0, 500), st.integers(1, 64)
)  # fmt: skip
def test_weights_are_low_runtime_is_high_and_the_gap_between_is_whole_kv_pages(
    managed: int, weights: int, page: int, runtime: int, graph_pool: int, align: int
) -> None:
    layout = BumpLayout(managed, managed, align_bytes=align)
    model = ModelMemory("a", weights, page, runtime, graph_pool)
    graph_pool_first = ((managed - runtime) // align * align - graph_pool) // align * align
    if graph_pool_first - -(-weights // align) * align < page:
        with pytest.raises(LayoutError, match="a needs"):
            layout.regions(model)
        return
    regions = layout.regions(model)
    assert regions.weights == (0, weights)
    assert regions.weights.end <= regions.kv.first and regions.kv.end <= regions.graph_pool.first
    assert regions.graph_pool.end <= regions.runtime.first and regions.runtime.end <= managed
    assert regions.kv.size == regions.kv_pages * page >= page
    assert regions.graph_pool.first - regions.kv.end < page, "no page more would fit"
    assert all(region.first % align == 0 for region in (regions.kv, regions.graph_pool, regions.runtime))
    assert (regions.graph_pool.size, regions.runtime.size) == (graph_pool, runtime)


def test_graphs_are_reused_exactly_if_all_base_addresses_are_unchanged() -> None:
    layout = BumpLayout(1000, 1000)
    captured = layout.regions(MODEL)
    assert layout.regions(replace(MODEL, name="b")).reuses_graphs_of(captured)
    assert layout.regions(replace(MODEL, kv_page_bytes=9)).reuses_graphs_of(captured), "sizes may differ"
    for change in ({"weight_bytes": 301}, {"runtime_bytes": 51}, {"graph_pool_bytes": 31}):
        assert not layout.regions(replace(MODEL, **change)).reuses_graphs_of(captured)


def test_a_model_that_leaves_no_room_for_one_kv_page_does_not_fit() -> None:
    layout = BumpLayout(387, 387)
    assert layout.regions(MODEL).kv_pages == 1
    with pytest.raises(LayoutError, match="a needs 387 bytes with one KV page, the managed buffer has 386"):
        BumpLayout(386, 386).regions(MODEL)


def test_the_peak_counts_the_residue_of_parked_models_and_stays_below_the_cap() -> None:
    layout = BumpLayout(1000, 1050)
    assert layout.peak_bytes([]) == 1000
    assert layout.peak_bytes([MODEL, MODEL]) == 1040
    with pytest.raises(LayoutError, match="1060 bytes with the residue of parked models, the device cap is 1050"):
        layout.peak_bytes([MODEL, MODEL, MODEL])


def test_a_buffer_larger_than_the_device_is_refused() -> None:
    for managed, cap, align in ((10, 9, 1), (0, 9, 1), (9, 9, 0)):
        with pytest.raises(LayoutError, match="managed_bytes"):
            BumpLayout(managed, cap, align_bytes=align)
