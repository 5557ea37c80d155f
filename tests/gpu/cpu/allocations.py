"""Run by the engine's interpreter: SGLang's own paged allocator and ours through the same operations, which both must survive alike.

Ours over its ``Tail`` gives as many pages, never one twice, of those that are free always the lowest. Says "alike" in the end.
"""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from talaria.gpu.hooks.allocator import LowPagesAllocator

PAGE, PAGES = 4, 40


class Side:
    """An allocator, and what each request holds of it."""

    def __init__(self, kind: type, *, low: bool) -> None:
        self.allocator: Any = kind(PAGE * PAGES, PAGE, torch.float32, "cpu", None, False)
        self.slots: dict[int, list[int]] = {}
        self.low = low

    def extend(self, request: int, prefix: int, length: int) -> bool:
        """Prefill from ``prefix`` tokens, which the request has, to ``length``."""
        held, free = self.slots.get(request, []), self.free_pages()
        last = held[-1] if held else -1
        tensors = [torch.tensor([value]) for value in (prefix, length, last)]
        out = self.allocator.alloc_extend(tensors[0], tensors[0], tensors[1], tensors[1], tensors[2], length - prefix)
        return self.took(request, held, free, out)

    def decode(self, requests: list[int]) -> bool:
        """A token each."""
        free = self.free_pages()
        lengths = torch.tensor([len(self.slots[one]) + 1 for one in requests])
        last = torch.tensor([self.slots[one][-1] for one in requests])
        out = self.allocator.alloc_decode(lengths, lengths, last)
        if out is None:
            return False
        for request, slot in zip(requests, out.tolist(), strict=True):
            self.slots[request] = [*self.slots[request], slot]
        self.check(free)
        return True

    def pages(self, request: int, count: int) -> bool:
        """Whole pages, as a restore takes them."""
        free = self.free_pages()
        return self.took(request, [], free, self.allocator.alloc(count * PAGE))

    def took(self, request: int, held: list[int], free: set[int], out: Any) -> bool:
        if out is None:
            return False
        self.slots[request] = held + out.tolist()
        self.check(free)
        return True

    def check(self, free: set[int]) -> None:
        """Against what was free before."""
        slots = [slot for held in self.slots.values() for slot in held]
        assert len(set(slots)) == len(slots) and min(slots, default=PAGE) >= PAGE and max(slots, default=0) < PAGE * (PAGES + 1)
        for held in self.slots.values():
            assert all(slot % PAGE == index % PAGE for index, slot in enumerate(held))
            assert all(after == before + 1 for before, after in itertools.pairwise(held) if after % PAGE)
        taken = free - self.free_pages()
        assert not taken & self.free_pages() and {slot // PAGE for slot in slots}.isdisjoint(self.free_pages())
        assert not self.low or sorted(taken) == sorted(free)[: len(taken)]

    def free(self, request: int, way: int) -> None:
        slots = torch.tensor(self.slots.pop(request))
        if way == 0:
            self.allocator.free(slots)
        elif way == 1:
            self.allocator.free_segment(slots, start_pos=0)
        else:
            self.allocator.free_group_begin()
            cut = len(slots) // PAGE // 2 * PAGE
            self.allocator.free(slots[:cut])
            self.allocator.free_page_ids(torch.unique(slots[cut:] // PAGE))
            self.allocator.free_group_end()

    def free_pages(self) -> set[int]:
        return set(self.allocator.get_all_free_pages().tolist())


def main(seed: int) -> None:
    draw = random.Random(seed)
    sides = [Side(PagedTokenToKVPoolAllocator, low=False), Side(LowPagesAllocator, low=True)]
    refused = 0
    for number in range(4000):
        action, held = draw.random(), list(sides[0].slots)
        if action < 0.3:
            length = draw.randrange(1, 6 * PAGE)
            done = [side.extend(number, 0, length) for side in sides]
        elif action < 0.4 and held:
            request = draw.choice(held)
            prefix = len(sides[0].slots[request])
            length = prefix + draw.randrange(1, 3 * PAGE)
            done = [side.extend(request, prefix, length) for side in sides]
        elif action < 0.65 and held:
            batch = draw.sample(held, draw.randrange(1, len(held) + 1))
            done = [side.decode(batch) for side in sides]
        elif action < 0.72:
            count = draw.randrange(1, 6)
            done = [side.pages(number, count) for side in sides]
        elif action < 0.998 and held:
            request, way = draw.choice(held), draw.randrange(3)
            done = [True]
            for side in sides:
                side.free(request, way)
        else:
            done = [True]
            for side in sides:
                side.allocator.clear()
                side.slots.clear()
        assert len(set(done)) == 1, (number, done)
        refused += not done[0]
        assert sides[0].allocator.available_size() == sides[1].allocator.available_size(), number
        assert len(sides[0].free_pages()) == len(sides[1].free_pages()), number
    assert refused > 20
    print("alike")


if __name__ == "__main__":
    main(int(sys.argv[1]))
