"""The lines served here: what of each is cached, as snapshots publish it, and how far a new prompt continues it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from talaria.gpu.kv.hashes import TOKEN_BYTES, PageChain
from talaria.policy.calls import Call, LineKey
from talaria.policy.snapshot import LineState, Tier

MOST_LINES = 8192
"""The least recently used ones are forgotten beyond it."""


@dataclass(slots=True)
class _Line:
    """Prompt and output of the last call that completed here: whole pages, and the tokens after them."""

    turn: int
    chain: PageChain
    tail: bytes
    used_s: float


class LineBook:
    """``cached``: tokens of a model's sequence that are on the device now, and tokens up to which the host continues them."""

    def __init__(self, cached: Callable[[str, PageChain], tuple[int, int]]) -> None:
        self._cached = cached
        self._lines: OrderedDict[LineKey, _Line] = OrderedDict()
        self._published: dict[LineKey, LineState] = {}
        """Snapshots hold this very mapping, so it is replaced and never changed."""
        self._stale: dict[LineKey, None] = {}

    def used(self, call: Call, chain: PageChain, tokens: bytes, now_s: float) -> None:
        """The call has completed here, with these tokens (prompt and output)."""
        tail = tokens[len(chain.hashes) * chain.page_tokens * TOKEN_BYTES :]
        self._lines[call.key] = _Line(call.turn, chain, tail, now_s)
        self._lines.move_to_end(call.key)
        self._stale[call.key] = None
        if len(self._lines) > MOST_LINES:
            self._stale[self._lines.popitem(last=False)[0]] = None

    def forget(self, key: LineKey) -> None:
        if self._lines.pop(key, None) is not None:
            self._stale[key] = None

    def doubt(self, model: str) -> None:
        """What device or host hold of the model has changed: any state may be wrong."""
        self._stale.update({key: None for key in self._lines if key.model == model})

    def exact(self, call: Call, prompt: bytes, chain: PageChain) -> Call:
        """``call`` with the true length of its prompt, and of what it continues as far as that is known here."""
        continues = []
        for line, estimate in call.continues or (((call.key.line, call.reusable_tokens),) if call.turn else ()):
            known = self._lines.get(call.key._replace(line=line))
            shared = min(estimate, chain.tokens)
            if known is not None:
                common = _common_tokens(known, prompt, chain)
                newest = line != call.key.line or known.turn == call.turn - 1
                shared = common if newest else max(common, shared)
            if shared:
                continues.append((line, shared))
        continues.sort(key=lambda item: -item[1])
        reusable = continues[0][1] if continues else 0
        return replace(call, prompt_tokens=chain.tokens, reusable_tokens=reusable, continues=tuple(continues), exact=True)

    def states(self) -> dict[LineKey, LineState]:
        """The states as they are now; the caller must not change them."""
        if self._stale:
            lines = self._published.copy()
            for key in self._stale:
                line = self._lines.get(key)
                if line is None:
                    lines.pop(key, None)
                    continue
                device, tokens = self._cached(key.model, line.chain)
                state = LineState(Tier.DEVICE if device else Tier.HOST if tokens else Tier.MISSING, tokens, line.used_s)
                if lines.get(key) != state:  # else the very state stays
                    lines[key] = state
            self._stale.clear()
            self._published = lines
        return self._published


def _common_tokens(line: _Line, prompt: bytes, chain: PageChain) -> int:
    """Longest common prefix; exact where the line's whole pages all agree, else down to a page."""
    pages = next((at for at, (ours, theirs) in enumerate(zip(chain.hashes, line.chain.hashes, strict=False)) if ours != theirs), None)
    if pages is None:
        pages = min(len(chain.hashes), len(line.chain.hashes))
    common = pages * chain.page_tokens
    if pages < len(line.chain.hashes):
        return common
    rest = prompt[common * TOKEN_BYTES : common * TOKEN_BYTES + len(line.tail)]
    for at in range(0, len(rest), TOKEN_BYTES):
        if rest[at : at + TOKEN_BYTES] != line.tail[at : at + TOKEN_BYTES]:
            break
        common += 1
    return common
