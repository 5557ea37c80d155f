"""The host registry under any sequence of operations, against the set of pages ever committed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from talaria.substrate.registry import Hold, HostRegistry, Ticket
from tests.substrate.content import Contents

PAGE = 4
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "branch", "checkpoint", "checkpoint", "commit", "abort", "pin", "ref", "let_go"]),
        st.integers(0, 50),
        st.integers(0, 50),
    ),
    min_size=10,
    max_size=50,
)


class Driver:
    """Runs operations on a registry and keeps every page that was ever committed, by what it contains."""

    def __init__(self, pages: int) -> None:
        self.contents = Contents()
        self.registry = HostRegistry(pages * PAGE, page_tokens=PAGE, forest=self.contents.forest)
        self.tickets: list[tuple[Ticket, str]] = []
        self.holds: list[tuple[Hold, bool, str, int, int]] = []
        self.committed: set[tuple[str, int, int]] = set()
        self.now_s = 0.0
        self.contents.forest.retain(self.contents.extend(self.contents.root(), 0, 9))

    def step(self, name: str, a: int, b: int) -> None:
        self.now_s += 1.0
        contents, registry = self.contents, self.registry
        node, model = contents.nodes[a % len(contents.nodes)], "xy"[b % 2]
        length = len(contents.paths[node])
        spans = contents.forest.spans(node, length)
        if name == "grow" and length < 60:
            contents.extend(node, length, length + b % 15)
        elif name == "branch" and length < 60:
            contents.forest.retain(contents.extend(node, b % (length + 1), b % (length + 1) + a % 15))
        elif name == "checkpoint":
            ticket = registry.checkpoint(model, spans, 1, self.now_s, owner=node)
            if ticket is not None:
                assert ticket.bytes == sum(count for _, _, count in ticket.parts) * PAGE > 0
                self.tickets.append((ticket, model))
        elif name in ("commit", "abort") and self.tickets:
            ticket, model = self.tickets.pop(a % len(self.tickets))
            if name == "abort":
                registry.abort(ticket)
                return
            registry.commit_all(ticket)
            self.committed |= {(model, n, page) for n, first, count in ticket.parts for page in range(first, first + count)}
        elif name in ("pin", "ref"):
            tokens = registry.match(model, spans)
            hold = (registry.pin if name == "pin" else registry.ref)(model, spans, tokens)
            self.holds.append((hold, name == "pin", model, node, tokens))
        elif name == "let_go" and self.holds:
            hold, pinned, *_ = self.holds.pop(a % len(self.holds))
            (registry.unpin if pinned else registry.unref)(hold)

    def run_of(self, model: str, node: int) -> int:
        """Tokens of the path whose pages have all been committed at some time."""
        spans = self.contents.forest.spans(node, len(self.contents.paths[node]))
        owner_of = [n for n, start, end in spans for _ in range(start, end)]
        ends = range(PAGE, len(owner_of) + 1, PAGE)
        return next((end - PAGE for end in ends if (model, owner_of[end - 1], end // PAGE - 1) not in self.committed), len(ends) * PAGE)

    def check(self, *, exact: bool) -> None:
        registry = self.registry
        assert 0 <= registry.held_bytes <= registry.used_bytes <= registry.capacity_bytes
        for node in self.contents.nodes:
            for model in "xy":
                matched = registry.match(model, self.contents.forest.spans(node, len(self.contents.paths[node])))
                run = self.run_of(model, node)
                assert matched == run if exact else matched <= run
        for _, _, model, node, tokens in self.holds:
            assert registry.match(model, self.contents.forest.spans(node, tokens)) == tokens, "held blocks stay"

    def wind_down(self) -> None:
        while self.tickets:
            self.registry.abort(self.tickets.pop()[0])
        while self.holds:
            self.step("let_go", 0, 0)
        assert self.registry.held_bytes == 0
        for model in "xy":
            self.registry.drop(model)
        assert self.registry.used_bytes == 0


@given(OPERATIONS)
def test_with_room_for_all_a_match_is_exactly_the_committed_prefix(operations: list[tuple[str, int, int]]) -> None:
    driver = Driver(100_000)
    for operation in operations:
        driver.step(*operation)
        driver.check(exact=True)
    driver.wind_down()


@given(OPERATIONS, st.integers(3, 20))
def test_under_pressure_held_blocks_stay_and_nothing_uncommitted_is_exposed(operations: list[tuple[str, int, int]], pages: int) -> None:
    driver = Driver(pages)
    for operation in operations:
        driver.step(*operation)
        driver.check(exact=False)
    driver.wind_down()
