"""Page hashes are SGLang's own, however the tokens arrive."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from talaria.gpu.kv.hashes import PageChain

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def packed(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def test_known_hashes_of_sglang() -> None:
    """Made with sglang 0.5.23: ``hash_str_to_int64`` of each of ``get_hash_str(tokens, None, page_size)``."""
    assert PageChain(1, packed([1, 2, 3])).hashes == [7470307888890966271, -1634645291211865391, 7325169757385981536]
    assert PageChain(4, packed(list(range(10, 22)))).hashes == [5428511633061281808, -13757886277339546, 5553466273895294815]
    long = PageChain(16, packed([0, 431, 2**32 - 1] * 20))
    assert long.hashes == [-7776264587698029761, 8341949011009212484, 4337135137355878899]
    assert long.tokens == 60


@given(parts=st.lists(TOKENS, max_size=6), page=st.sampled_from([1, 3, 16]))
def test_a_chain_grown_in_parts_equals_one_made_at_once(parts: list[list[int]], page: int) -> None:
    grown = PageChain(page)
    for part in parts:
        grown.extend(packed(part))
    whole = PageChain(page, packed([token for part in parts for token in part]))
    assert (grown.hashes, grown.tokens) == (whole.hashes, whole.tokens)
    assert len(whole.hashes) == whole.tokens // page


@given(common=TOKENS, left=TOKENS, right=TOKENS)
def test_a_copy_goes_its_own_way(common: list[int], left: list[int], right: list[int]) -> None:
    one = PageChain(4, packed(common))
    other = one.copy()
    one.extend(packed(left))
    other.extend(packed(right))
    assert one.hashes == PageChain(4, packed(common + left)).hashes
    assert other.hashes == PageChain(4, packed(common + right)).hashes
