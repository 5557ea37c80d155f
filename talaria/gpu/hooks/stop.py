"""Ends a running segment early, and exactly: runs in the scheduler, on every rank alike.

SGLang's own abort takes a request's last token without a look at it: an end of sequence or a stop string that it completes would be
missed. So a segment is cut as its grant would have cut it, by its token limit, which comes down to one more than there is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, Final

from talaria.gpu import compat, seams


def _shorten(original: Callable[..., None], scheduler: Any, received: Any) -> None:
    if received.abort_message != compat.SHORTEN:
        original(scheduler, received)
        return
    chunked = () if scheduler.chunked_req is None else (scheduler.chunked_req,)
    queued = chain(scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue, chunked)
    for request in {*scheduler.collect_inflight_reqs(), *queued}:
        if request.rid == received.rid:
            limits = request.sampling_params
            limits.max_new_tokens = min(limits.max_new_tokens, len(request.output_ids) + 1)


HOOKS: Final = (compat.Hook(seams.ABORT, "around", _shorten),)
