"""Whatever ranks do, what is restored is what was computed, and the invariants of the pool hold after every message."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from talaria.gpu.memory.store import Grant
from tests.gpu.memory.devices import Host, Rank, chain, host_of
from tests.gpu.memory.witness import Witness

MODELS = ("mha", "mla")
SLABS, STEPS = 60, 400
LONGEST_PAGES = 8


class Late(NamedTuple):
    """A copy that has not ended."""

    rank: Rank
    prompt: list[bytes]
    number: int
    grant: Grant


class Walk:
    """Two models, two ranks, sessions that grow and fork, lagging and failing copies, barriers, deaths, and a pool that is too small."""

    def __init__(self, host: Host, draw: random.Random) -> None:
        self._host, self._draw, self.store = host, draw, host.store
        self._engines = {model: host.engine(model) for model in MODELS}
        self._sessions = {model: [[f"{model}{draw.random()}"] for _ in range(4)] for model in MODELS}
        self._late: list[Late] = []
        self._dying: list[Rank] = []
        self._dead: list[Late] = []
        """Of dying ranks: nobody listens to them any more, and they go on."""
        self.restored = 0
        """Pages."""

    def step(self, number: int) -> None:
        draw, model = self._draw, self._draw.choice(MODELS)
        session, action = draw.choice(self._sessions[model]), draw.random()
        if action < 0.5:
            self._save(model, session, float(number))
        elif action < 0.7 and self._late:
            self._end(self._late.pop(draw.randrange(len(self._late))))
        elif action < 0.75 and self._dying:
            self._die(self._dying.pop(draw.randrange(len(self._dying))))
        elif action < 0.95:
            ends = {rank.restore(self.store, chain(*session)) for rank in self._engines[model]}
            assert len(ends) == 1
            self.restored += ends.pop()
        elif draw.random() < 0.5:
            self._barrier(model)
        else:
            self._lose(model)

    def _save(self, model: str, session: list[str], now_s: float) -> None:
        draw = self._draw
        session.append(str(draw.random()))
        if len(session) > LONGEST_PAGES:
            del session[draw.randrange(1, LONGEST_PAGES) :]
        prompt = chain(*session)
        for rank in self._engines[model]:
            mine = prompt[: draw.randrange(1, len(prompt) + 1)] if draw.random() < 0.1 else prompt
            late = Late(rank, mine, *rank.offer(self.store, mine, now_s))
            if draw.random() < 0.3:
                self._late.append(late)
            else:
                self._end(late, complete=draw.random() < 0.9)

    def _end(self, late: Late, *, complete: bool = True) -> None:
        late.rank.write(late.prompt, late.grant)
        self.store.saved(late.rank.seat, late.number, complete=complete)

    def _die(self, rank: Rank) -> None:
        for late in self._dead:
            if late.rank is rank:
                rank.write(late.prompt, late.grant)
        self.store.gone(rank.seat)

    def _barrier(self, model: str) -> None:
        for late in self._take_late(model):
            self._end(late)
        for rank in self._engines[model]:
            self.store.drain(rank.seat)

    def _lose(self, model: str) -> None:
        engine = self._engines[model]
        self._dead += self._take_late(model)
        for rank in self._draw.sample(engine, len(engine)):
            self.store.leave(rank.seat)
        self._dying += engine
        self._engines[model] = self._host.engine(model)

    def _take_late(self, model: str) -> list[Late]:
        mine = [late for late in self._late if late.rank in self._engines[model]]
        self._late = [late for late in self._late if late.rank not in self._engines[model]]
        return mine

    def end(self) -> None:
        for late in self._late:
            self._end(late, complete=False)
        self._late = []
        for model in MODELS:
            self._barrier(model)
        for rank in self._dying:
            self.store.gone(rank.seat)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_ranks_do_what_is_restored_is_what_was_computed(seed: int) -> None:
    with host_of(SLABS, 2) as host:
        witness = Witness(host.server, 0, "")
        walk = Walk(host, random.Random(seed))
        for number in range(STEPS):
            walk.step(number)
            assert host.store.audit() == []
            witness.check()
        assert walk.restored > 50
        assert host.store.registry.evictions > 0
        walk.end()
        assert not host.store.registry.held_bytes
        witness.check()
