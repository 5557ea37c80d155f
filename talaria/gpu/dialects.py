"""The endpoints that reach a model, and how each client library expects to hear that something went wrong."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

_encode = msgspec.json.Encoder().encode


class Problem(Exception):
    """A request that is answered by an error: HTTP status, words for the client, and when to try again (seconds)."""

    def __init__(self, status: int, message: str, *, kind: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after_s = status, message, retry_after_s
        self.kind = kind
        """A finer code than the status: ``model_not_found``."""

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(max(1, round(self.retry_after_s)))}


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class Endpoint(NamedTuple):
    """One path. ``api``: whose shapes it speaks: ``openai``, ``responses`` or ``anthropic``."""

    path: str
    api: str
    turns: str | None
    """Field of the body that holds the conversation."""

    def error_document(self, problem: Problem) -> dict[str, Any]:
        """The body of an error answer."""
        if self.api == "anthropic":
            kind = _ANTHROPIC_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": problem.message}}
        kind = _OPENAI_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
        return {"error": {"message": problem.message, "type": kind, "param": None, "code": problem.kind or None}}

    def error_body(self, problem: Problem) -> bytes:
        return _encode(self.error_document(problem))

    def error_event(self, problem: Problem) -> bytes:
        """The last event of a stream that had begun."""
        document = self.error_document(problem)
        if self.api == "anthropic":
            return b"event: error\ndata: " + _encode(document) + b"\n\n"
        if self.api == "responses":
            error = document["error"]
            event = {
                "type": "error",
                "code": error["code"] or error["type"],
                "message": error["message"],
                "param": None,
                "sequence_number": 0,
            }
            return b"event: error\ndata: " + _encode(event) + b"\n\n"
        return b"data: " + _encode(document) + b"\n\ndata: [DONE]\n\n"


CHAT: Final = Endpoint("/v1/chat/completions", "openai", "messages")
COMPLETIONS: Final = Endpoint("/v1/completions", "openai", "prompt")
RESPONSES: Final = Endpoint("/v1/responses", "responses", "input")
MESSAGES: Final = Endpoint("/v1/messages", "anthropic", "messages")
COUNT_TOKENS: Final = Endpoint("/v1/messages/count_tokens", "anthropic", None)
OTHER: Final = Endpoint("", "openai", None)
"""What is no endpoint of a model complains in OpenAI's words."""

CALLS: Final = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment of the event stream: every client skips it."""


def message_of(body: bytes) -> str:
    """The words in an error body of any of the dialects, for a client that can only be sent an event any more."""
    try:
        document = msgspec.json.decode(body)
        error = document.get("error", document)
        found = error.get("message") if isinstance(error, dict) else error
    except (msgspec.DecodeError, AttributeError, RecursionError):
        found = None
    return found if isinstance(found, str) and found else "the engine refused the call"
