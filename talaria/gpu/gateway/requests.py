"""A client's request, read once: what the gateway must know of it, and the body as it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from talaria.gpu.dialects import RESPONSES, Endpoint, Problem
from talaria.gpu.gateway.settings import Settings

MOST_OUTPUT_TOKENS = 10_000_000

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class ClientRequest:
    """``body`` is the client's own bytes unless the model had to be named otherwise."""

    endpoint: Endpoint
    model: str
    stream: bool
    document: dict[str, Any]
    body: bytes

    @property
    def output_tokens(self) -> int | None:
        """How many there will be, where the request leaves no choice, as in a replay: the end of sequence is ignored up to a limit."""
        document = self.document
        if document.get("ignore_eos") is not True:
            return None
        limit = document.get("max_completion_tokens") or document.get("max_tokens")
        return limit if type(limit) is int and 0 < limit < MOST_OUTPUT_TOKENS else None


def read(endpoint: Endpoint, body: bytes, settings: Settings) -> ClientRequest:
    """Raises Problem for what is no request at all; the engine judges the rest."""
    try:
        document = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Problem(400, "the body is no valid JSON") from None
    if not isinstance(document, dict):
        raise Problem(400, "the body must be a JSON object")
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise Problem(400, "stream must be true or false")
    asked = document.get("model")
    model = settings.served_name(asked)
    if endpoint is RESPONSES:
        _refuse_kept_state(document)
    if asked != model:
        document["model"] = model
        try:
            body = _encode(document)
        except (OverflowError, ValueError, RecursionError):
            raise Problem(400, "the body holds a number that cannot be passed on") from None
    return ClientRequest(endpoint, model, bool(stream), document, body)


def _refuse_kept_state(document: dict[str, Any]) -> None:
    """State between requests would live in one engine's memory, and no other could continue it."""
    if document.get("previous_response_id") is not None:
        raise Problem(400, "previous_response_id is not supported: responses are not kept, send the whole conversation as input")
    if document.get("background"):
        raise Problem(400, "background is not supported: responses are not kept")
