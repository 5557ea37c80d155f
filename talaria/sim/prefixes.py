"""Where each call's content lies in the prefix forest: the simulator's stand-in for token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from talaria.substrate.prefix import BlockIndex, PrefixForest
from talaria.workload.session import Session, TraceCall


class PromptBook:
    """Gives every call a node whose path is its prompt and response.

    A call that continues another shares that one's path; where a trace has block hashes that mean the same content
    everywhere, calls of different sessions share what their hashes agree on.
    """

    def __init__(self, forest: PrefixForest, block_tokens: int, block_scope: str) -> None:
        self._forest = forest
        shared = block_tokens > 0 and block_scope == "global"
        self._index = BlockIndex(forest, block_tokens) if shared else None

    def locate(self, session: Session, index: int, nodes: dict[int, int]) -> int:
        """The node of call ``index``, entered into ``nodes`` with those it continues. Retained until ``forget``.

        A call may continue one that another line has not issued yet: content has its place before anybody computes it.
        """
        pending = [index]
        while (source := session.calls[pending[-1]].reuse_of) is not None and source not in nodes:
            pending.append(source)
        for each in reversed(pending):
            if each not in nodes:
                nodes[each] = self._place(session.calls[each], nodes)
        return nodes[index]

    def _place(self, call: TraceCall, nodes: Mapping[int, int]) -> int:
        forest = self._forest
        total_tokens = call.prompt_tokens + call.output_tokens
        base = None if call.reuse_of is None or call.reuse_tokens == 0 else (nodes[call.reuse_of], call.reuse_tokens)
        if self._index is not None and call.blocks:
            node = forest.extend(self._index.insert(call.blocks, call.prompt_tokens, base), call.prompt_tokens, total_tokens)
        elif base is not None:
            node = forest.extend(*base, total_tokens)
        else:
            node = forest.extend(forest.new_root(), 0, total_tokens)
        forest.retain(node)
        return node

    def forget(self, nodes: Iterable[int]) -> None:
        """The session is over; caches may hold on to its content a little longer."""
        for node in nodes:
            self._forest.release(node)
