"""The agent's small books: decode counters, submissions seen, and lines."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.gpu.agent.decode import DecodeClock
from talaria.gpu.agent.lines import MOST_LINES, LineBook
from talaria.gpu.agent.seen import SeenSubmissions
from talaria.gpu.kv.hashes import PageChain
from talaria.gpu.kv.mirror import KvMirror
from talaria.policy.calls import Call, LineKey
from talaria.policy.snapshot import Tier

PAGE_TOKENS = 4


@given(st.permutations(range(1, 12)), st.integers(0, 11))
def test_seen_is_the_last_number_without_a_gap_before_it(numbers: list[int], upto: int) -> None:
    seen, so_far = SeenSubmissions(), set[int]()
    for number in numbers[:upto]:
        seen.add(number)
        so_far.add(number)
        assert seen.last == next(last for last in range(12) if last + 1 not in so_far)
    seen.add(1)
    assert seen.last >= 1


def test_every_sequence_takes_part_in_every_step_however_its_tokens_are_reported() -> None:
    """Two sequences, three steps, one of them reported in a single message."""
    clock = DecodeClock()
    clock.prefilled(1, 10, 1, 5.0)
    clock.prefilled(2, 20, 1, 6.0)
    clock.decoded(1, 2, 6.1)
    clock.decoded(2, 2, 6.1)
    clock.decoded(2, 3, 6.3)
    clock.decoded(1, 4, 6.4)
    clock.decoded(2, 4, 6.4)
    assert (clock.steps, clock.sequence_steps) == (3, 6)
    assert clock.context_steps == (11 + 12 + 13) + (21 + 22 + 23)
    assert clock.seconds == pytest.approx(0.4)


def test_a_stall_for_a_prefill_is_not_decode() -> None:
    clock = DecodeClock()
    clock.prefilled(1, 10, 1, 0.0)
    clock.decoded(1, 2, 0.1)
    clock.prefilled(2, 500, 1, 2.1)
    clock.decoded(1, 3, 2.2)
    clock.decoded(2, 2, 2.2)
    assert (clock.steps, clock.seconds) == (2, pytest.approx(0.2))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=60))
def test_counters_grow_and_agree_with_the_tokens(reports: list[tuple[int, int]]) -> None:
    clock, tokens, now_s = DecodeClock(), dict[int, int](), 0.0
    for call, more in reports:
        now_s += 0.01
        before = (clock.seconds, clock.steps, clock.sequence_steps, clock.context_steps)
        tokens[call] = tokens.get(call, 0) + more
        if clock.knows(call):
            clock.decoded(call, tokens[call], now_s)
        else:
            tokens[call] = 1
            clock.prefilled(call, 100, 1, now_s)
        assert all(
            new >= old for new, old in zip((clock.seconds, clock.steps, clock.sequence_steps, clock.context_steps), before, strict=True)
        )
    assert clock.sequence_steps == sum(count - 1 for count in tokens.values())
    assert clock.steps <= clock.sequence_steps and clock.seconds <= now_s


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def call(session: str, turn: int, reusable: int = 0) -> Call:
    return Call(1, LineKey("t", session, "m", "main"), turn, 0.0, 1000, reusable, None, (), None, False)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_what_a_return_continues_is_its_longest_common_prefix_down_to_a_page_where_it_breaks(before: list[int], after: list[int]) -> None:
    book = LineBook(lambda model, chain: (0, 0))
    chain = PageChain(PAGE_TOKENS, pack(before))
    book.used(call("s", 0), chain, pack(before), 1.0)
    common = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), min(len(before), len(after)))
    found = book.exact(call("s", 1, 7), pack(after), PageChain(PAGE_TOKENS, pack(after)))
    assert found.exact and found.prompt_tokens == len(after)
    assert common - PAGE_TOKENS < found.reusable_tokens <= common
    if len(before) <= common:
        assert found.reusable_tokens == common
    assert found.continues == ((("main", found.reusable_tokens),) if found.reusable_tokens else ())


def test_a_line_whose_last_call_was_served_elsewhere_keeps_the_gateway_s_estimate() -> None:
    book = LineBook(lambda model, chain: (0, 0))
    old = list(range(8))
    book.used(call("s", 0), PageChain(PAGE_TOKENS, pack(old)), pack(old), 1.0)
    prompt = pack(list(range(40)))
    assert book.exact(call("s", 2, 30), prompt, PageChain(PAGE_TOKENS, prompt)).reusable_tokens == 30
    assert book.exact(call("elsewhere", 1, 30), prompt, PageChain(PAGE_TOKENS, prompt)).reusable_tokens == 30
    assert book.exact(call("elsewhere", 1, 90), prompt, PageChain(PAGE_TOKENS, prompt)).reusable_tokens == 40
    assert book.exact(call("new", 0), prompt, PageChain(PAGE_TOKENS, prompt)).reusable_tokens == 0


def test_published_lines_follow_the_mirror_and_do_not_change_afterwards() -> None:
    mirror, tokens, host = KvMirror(PAGE_TOKENS), pack(list(range(10))), 0
    chain = PageChain(PAGE_TOKENS, tokens)
    book = LineBook(lambda model, chain: (mirror.device_tokens(chain), max(host, mirror.device_tokens(chain))))
    mirror.stored(chain.hashes)
    book.used(call("s", 0), chain, tokens, 3.0)
    key = call("s", 0).key
    first = book.states()
    assert (first[key].tier, first[key].tokens, first[key].last_use_s) == (Tier.DEVICE, 8, 3.0)
    mirror.cleared()
    book.doubt("m")
    assert book.states()[key].tier is Tier.MISSING and first[key].tier is Tier.DEVICE
    host = 4
    book.doubt("m")
    assert (book.states()[key].tier, book.states()[key].tokens) == (Tier.HOST, 4)
    book.forget(key)
    assert book.states() == {}


def test_lines_are_bounded_by_forgetting_the_least_recently_used() -> None:
    book, tokens = LineBook(lambda model, chain: (0, 0)), pack([1])
    for number in range(MOST_LINES + 3):
        book.used(call(f"s{number}", 0), PageChain(PAGE_TOKENS, tokens), tokens, 1.0)
    states = book.states()
    assert len(states) == MOST_LINES and call("s0", 0).key not in states
