"""Agreement between ranks against the content that each of them holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from talaria.substrate.agreement import RankAgreement
from talaria.substrate.prefix import page_hashes

PAGE = 2


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=16, max_size=16), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), max_size=40),
)
def test_ranks_agree_on_the_longest_boundary_that_all_hold_alike(tokens: list[list[int]], reports: list[tuple[int, int]]) -> None:
    agreement = RankAgreement(len(tokens), 0)
    hashes = [page_hashes(held, PAGE) for held in tokens]
    reported: list[set[int]] = [set() for _ in tokens]
    for rank, page in reports:
        rank %= len(tokens)
        agreement.report(rank, page, hashes[rank][page - 1])
        reported[rank] = {end for end in reported[rank] if end < page} | {page}
        alike = {end for end in range(1, 9) if len({tuple(held[: end * PAGE]) for held in tokens}) == 1}
        assert agreement.agreed_page == max(alike.intersection(*reported), default=0)


def test_agreement_ends_where_the_pages_were_cut() -> None:
    agreement = RankAgreement(2, 3)
    for rank in (0, 1):
        agreement.report(rank, 5, b"5")
        agreement.report(rank, 7, b"7")
    agreement.cut(6)
    assert agreement.agreed_page == 5
    agreement.cut(4)
    assert agreement.agreed_page == 3
