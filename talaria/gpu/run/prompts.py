"""Prompts for a recorded trace: token ids of the recorded lengths that share with each other what the recorded prompts shared.

A prompt begins with the first ``reuse_tokens`` of (prompt + actual response) of the call that it continues, or with what all
sessions have in common; where the trace has block hashes, equal hashes give equal content. The rest is drawn, so that nothing is
found in a cache that was not found in the recorded run. The same trace and seed give the same draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from talaria.workload.session import Session, TraceCall
from talaria.workload.streams import stream

Ids = NDArray[np.uint32]
_NOTHING: Ids = np.empty(0, np.uint32)


@dataclass(slots=True)
class SessionText:
    """What a session's calls have said so far, by call index."""

    prompts: dict[int, Ids] = field(default_factory=dict)
    responses: dict[int, Ids] = field(default_factory=dict)


class PromptBook:
    """``vocabulary`` has, by model, ordinary token ids to draw from; ``block_tokens`` and ``block_scope`` are the workload's."""

    def __init__(self, seed: int, vocabulary: Mapping[str, Sequence[int]], block_tokens: int, block_scope: str) -> None:
        self._seed = seed
        self._vocabulary = {model: np.array(ids, np.uint32) for model, ids in vocabulary.items()}
        self._block_tokens, self._block_scope = block_tokens, block_scope
        self._shared: dict[str, Ids] = {}

    def prompt(self, session: Session, index: int, text: SessionText) -> Ids:
        """The prompt of call ``index``, also entered into ``text``. Exactly ``prompt_tokens`` long."""
        call = session.calls[index]
        ids = self._drawn(call.model, f"content of {session.id} {index}", call.prompt_tokens)
        self._write_blocks(ids, session, call)
        head = self._head(session, call, text)
        ids[: len(head)] = head
        text.prompts[index] = ids
        return ids

    def _head(self, session: Session, call: TraceCall, text: SessionText) -> Ids:
        """What the prompt begins with because it was said before."""
        if call.reuse_of is not None and session.calls[call.reuse_of].model == call.model:
            # A call that another line has not issued yet has said nothing: then there is nothing to continue.
            said = np.concatenate([text.prompts.get(call.reuse_of, _NOTHING), text.responses.get(call.reuse_of, _NOTHING)])
            return said[: call.reuse_tokens]
        if call.turn == 0 and not call.blocks:
            return self._common(call.model, min(session.shared_tokens, call.prompt_tokens))
        return _NOTHING

    def _common(self, model: str, tokens: int) -> Ids:
        known = self._shared.get(model, _NOTHING)
        if len(known) < tokens:
            known = self._shared[model] = self._drawn(model, f"common to all sessions on {model}", 2 * tokens)
        return known[:tokens]

    def _write_blocks(self, ids: Ids, session: Session, call: TraceCall) -> None:
        size, scope = self._block_tokens, "" if self._block_scope == "global" else session.id
        for number, block in enumerate(call.blocks):
            ids[number * size : (number + 1) * size] = self._drawn(call.model, f"block {block} {scope}", size)

    def _drawn(self, model: str, what: str, tokens: int) -> Ids:
        """The first ``tokens`` of an endless text; a longer draw begins with a shorter one."""
        known = self._vocabulary[model]
        return known[stream(self._seed, f"{model}: {what}").integers(len(known), size=tokens)]
