"""Makes a segment of a call an exact continuation: runs in the scheduler, on every rank alike.

A later segment of a call arrives as one input, prompt and output so far. The hook splits the output off again, as if the request
had been retracted, so that limits, stop strings and counts are those of the whole call. What a request carries from token to token
beside its ids is brought up to date: grammar, penalties, logprobs, the count of reasoning tokens.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

from talaria.gpu import compat, seams

OUTPUT_TOKENS: Final = "talaria_output_tokens"
"""Key of ``sampling_params.custom_params``: how many of the last input ids are output of earlier segments."""
_PENDING: Final = "talaria_pending_tokens"


def _split(request: Any, scheduler: Any, received: Any, *_arguments: Any, **_named: Any) -> None:
    """After a request is created: its last input ids become its output."""
    custom = received.sampling_params.custom_params
    count = custom.get(OUTPUT_TOKENS, 0) if isinstance(custom, dict) else 0
    if not isinstance(count, int) or not 0 < count < len(request.origin_input_ids):
        return
    ids = request.origin_input_ids
    request.origin_input_ids, request.output_ids = ids[:-count], ids[-count:]
    request.origin_input_ids_unpadded = request.origin_input_ids
    request.full_untruncated_fill_ids = array("q")
    request.send_token_offset = count
    setattr(request, _PENDING, count)
    scheduler.batch_result_processor._maybe_update_reasoning_tokens(request, request.output_ids.tolist())
    if request.return_logprob:
        _pad_logprobs(request, count)


def _pad_logprobs(request: Any, count: int) -> None:
    """The logprobs of earlier segments count as sent; those of the input are no longer wanted."""
    request.send_output_token_logprobs_offset = count
    logprob, nothing = request.logprob, [None] * count
    logprob.output_token_logprobs_val, logprob.output_token_logprobs_idx = [0.0] * count, request.output_ids.tolist()
    if logprob.top_logprobs_num > 0:
        logprob.output_top_logprobs_val, logprob.output_top_logprobs_idx = nothing[:], nothing[:]
    if logprob.token_ids_logprob is not None:
        logprob.output_token_ids_logprobs_val, logprob.output_token_ids_logprobs_idx = nothing[:], nothing[:]
    logprob.input_token_logprobs_val, logprob.input_token_logprobs_idx = [], []
    logprob.input_top_logprobs_val, logprob.input_top_logprobs_idx = [], []
    logprob.input_token_ids_logprobs_val, logprob.input_token_ids_logprobs_idx = [], []


def _advance(request: Any) -> None:
    """The grammar accepts what was generated under it. Does nothing the second time."""
    count = request.__dict__.pop(_PENDING, 0)
    grammar = request.grammar
    if not count or grammar is None or not hasattr(grammar, "accept_token"):
        return
    try:
        for token in request.output_ids[:count]:
            grammar.accept_token(token)
    except ValueError as error:
        request.set_finish_with_abort(f"the output so far does not fit the grammar: {error}")


def _grammar_known(queued: bool, _manager: Any, req: Any) -> None:
    if not queued:
        _advance(req)


def _grammars_ready(requests: list[Any], _manager: Any) -> None:
    for request in requests:
        _advance(request)


def _seed_penalties(_result: None, orchestrator: Any, *_arguments: Any, **_named: Any) -> None:
    """After the penalties of a prefill batch are set up, which SGLang starts at zero: counts the output there already is.

    With overlapped scheduling SGLang's own counts lag one token and begin with the prompt's last one; so do these.
    """
    batch = orchestrator.batch
    for row, request in enumerate(batch.reqs):
        if not request.output_ids:
            continue
        seen = list(request.output_ids)
        if batch.enable_overlap:
            seen = [request.origin_input_ids[-1], *seen[:-1]]
        for penalizer in orchestrator.penalizers.values():
            if penalizer.is_prepared():
                _count(penalizer, row, seen)


def _count(penalizer: Any, row: int, seen: list[int]) -> None:
    import torch

    state = vars(penalizer)
    ids = torch.tensor(seen, dtype=torch.int64, device=penalizer.orchestrator.device)
    if (sums := state.get("cumulated_frequency_penalties")) is not None:
        sums[row].index_add_(0, ids, penalizer.frequency_penalties[row].expand(len(seen)))
    if (sums := state.get("cumulated_presence_penalties")) is not None:
        sums[row][ids] = penalizer.presence_penalties[row]
    if (factors := state.get("cumulated_repetition_penalties")) is not None:
        factors[row][ids] = penalizer.repetition_penalties[row]
    if (lengths := state.get("len_output_tokens")) is not None:
        lengths[row] = len(seen)


HOOKS: Final = (
    compat.Hook(seams.CREATE, "after", _split),
    compat.Hook(seams.GRAMMAR, "after", _grammar_known),
    compat.Hook(seams.GRAMMARS_READY, "after", _grammars_ready),
    compat.Hook(seams.PENALTIES, "after", _seed_penalties),
)
