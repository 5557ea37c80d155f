"""Answers in the formats of the four endpoints: a stream's head, tokens and tail, a whole answer, and errors."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from tests.gpu.stub.engine import Run

ANTHROPIC_ERRORS = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}


_dump: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def _data(value: Any) -> bytes:
    return b"data: " + _dump(value) + b"\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\n" + _data(value)


def _text(run: Run) -> str:
    return b"".join(run.output).decode()


def _ids(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()


class Format(ABC):
    """How one endpoint answers one call."""

    limit_names: tuple[str, ...] = ("max_tokens",)
    default_limit = 100_000

    def __init__(self, body: dict[str, Any], run: Run) -> None:
        self.body, self.run = body, run
        self.model, self.created = body.get("model", ""), int(time.time())

    def opening(self) -> bytes | None:
        """What a stream begins with before its first token; None: nothing, not even its status."""
        return None

    @abstractmethod
    def head(self) -> bytes: ...

    @abstractmethod
    def token(self, word: bytes) -> bytes: ...

    @abstractmethod
    def tail(self) -> bytes: ...

    @abstractmethod
    def whole(self) -> bytes: ...

    @staticmethod
    def error(status: int, why: str) -> bytes:
        return _dump({"object": "error", "message": why, "type": "BadRequestError", "param": None, "code": status})

    @classmethod
    def error_event(cls, status: int, why: str) -> bytes:
        return b'data: {"error":' + cls.error(status, why) + b"}\n\n"

    def usage(self) -> dict[str, Any]:
        run = self.run
        return {
            "prompt_tokens": run.prompt_tokens, "completion_tokens": len(run.output), "total_tokens": run.prompt_tokens + len(run.output),
            "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
        }  # fmt: skip


class Chat(Format):
    limit_names = ("max_completion_tokens", "max_tokens")

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _data(
            {"id": self.run.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model, "choices": choices, **more}
        )

    def head(self) -> bytes:
        before = self._chunk([{"index": 0, "delta": {"content": "#"}, "logprobs": None, "finish_reason": None}])
        self._before, self._after = before.split(b"#")
        return self._chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}])

    def token(self, word: bytes) -> bytes:
        return self._before + word + self._after

    def tail(self) -> bytes:
        end = self._chunk([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": self.run.finish}])
        if (self.body.get("stream_options") or {}).get("include_usage"):
            end += self._chunk([], usage=self.usage())
        return end + b"data: [DONE]\n\n"

    def whole(self) -> bytes:
        message = {"role": "assistant", "content": _text(self.run), "reasoning_content": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.run.finish}
        return _dump({
            "id": self.run.id, "object": "chat.completion", "created": self.created, "model": self.model, "choices": [choice],
            "usage": self.usage(),
        })  # fmt: skip


class Completions(Format):
    default_limit = 16

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _data(
            {"id": self.run.id, "object": "text_completion", "created": self.created, "model": self.model, "choices": choices, **more}
        )

    def head(self) -> bytes:
        """Nothing goes before the first token; the prompt's ids go with it, where they are asked for."""
        self._ids = _ids(self.run.prompt) if self.body.get("return_token_ids") else None
        self._before, self._after = self._chunk([{"index": 0, "text": "#", "logprobs": None, "finish_reason": None}]).split(b"#")
        return b""

    def token(self, word: bytes) -> bytes:
        if not self.body.get("return_token_ids"):
            return self._before + word + self._after
        more, self._ids = {"prompt_token_ids": self._ids} if self._ids else {}, None
        return self._chunk([{"index": 0, "text": word.decode(), "logprobs": None, "finish_reason": None, "token_ids": _ids(word), **more}])

    def tail(self) -> bytes:
        end = self._chunk([{"index": 0, "text": "", "logprobs": None, "finish_reason": self.run.finish}])
        if (self.body.get("stream_options") or {}).get("include_usage"):
            end += self._chunk([], usage=self.usage())
        return end + b"data: [DONE]\n\n"

    def whole(self) -> bytes:
        output = b"".join(self.run.output)
        choice = {"index": 0, "text": output.decode(), "logprobs": None, "finish_reason": self.run.finish}
        if self.body.get("return_token_ids"):
            choice |= {"token_ids": _ids(output), "prompt_token_ids": _ids(self.run.prompt)}
        return _dump({
            "id": self.run.id, "object": "text_completion", "created": self.created, "model": self.model, "choices": [choice],
            "usage": self.usage(),
        })  # fmt: skip


class Messages(Format):
    def _message(self, **more: Any) -> dict[str, Any]:
        return {
            "id": self.run.id, "type": "message", "role": "assistant", "content": [], "model": self.model, "stop_reason": None,
            "stop_sequence": None, "usage": self._usage(0), **more,
        }  # fmt: skip

    def _usage(self, output_tokens: int) -> dict[str, int]:
        cached = self.run.cached_tokens
        return {"input_tokens": self.run.prompt_tokens - cached, "cache_read_input_tokens": cached, "output_tokens": output_tokens}

    def _stop_reason(self) -> str:
        return "max_tokens" if self.run.finish == "length" else "end_turn"

    def opening(self) -> bytes | None:
        return b""

    def head(self) -> bytes:
        delta = _event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "#"}})
        self._before, self._after = delta.split(b"#")
        return _event({"type": "message_start", "message": self._message()}) + _event(
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        )

    def token(self, word: bytes) -> bytes:
        return self._before + word + self._after

    def tail(self) -> bytes:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        return (
            _event({"type": "content_block_stop", "index": 0})
            + _event({"type": "message_delta", "delta": delta, "usage": {"output_tokens": len(self.run.output)}})
            + _event({"type": "message_stop"})
        )

    def whole(self) -> bytes:
        content = [{"type": "text", "text": _text(self.run)}]
        return _dump(self._message(content=content, stop_reason=self._stop_reason(), usage=self._usage(len(self.run.output))))

    @staticmethod
    def error(status: int, why: str) -> bytes:
        return _dump({"type": "error", "error": {"type": ANTHROPIC_ERRORS.get(status, "api_error"), "message": why}})

    @classmethod
    def error_event(cls, status: int, why: str) -> bytes:
        return b"event: error\ndata: " + cls.error(status, why) + b"\n\n"


class Responses(Format):
    limit_names = ("max_output_tokens",)

    def __init__(self, body: dict[str, Any], run: Run) -> None:
        super().__init__(body, run)
        self._number = 0
        self._item = {"item_id": f"msg_{run.id}", "output_index": 0, "content_index": 0}

    def _say(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        return _event({"type": f"response.{kind}", "sequence_number": self._number - 1, **more})

    def _response(self, status: str, output: list[Any], usage: Any) -> dict[str, Any]:
        return {
            "id": f"resp_{self.run.id}", "object": "response", "created_at": self.created, "model": self.model, "status": status,
            "output": output, "usage": usage, "error": None, "incomplete_details": None, "tools": [], "tool_choice": "auto",
            "parallel_tool_calls": True,
        }  # fmt: skip

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [self._part(text)]
        return {"id": self._item["item_id"], "type": "message", "role": "assistant", "status": status, "content": content}

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def opening(self) -> bytes | None:
        begun = self._response("in_progress", [], None)
        return self._say("created", response=begun) + self._say("in_progress", response=begun)

    def head(self) -> bytes:
        return self._say("output_item.added", output_index=0, item=self._message("in_progress", None)) + self._say(
            "content_part.added", **self._item, part=self._part("")
        )

    def token(self, word: bytes) -> bytes:
        return self._say("output_text.delta", **self._item, delta=word.decode(), logprobs=[])

    def tail(self) -> bytes:
        text = _text(self.run)
        response = self._final()
        return (
            self._say("output_text.done", **self._item, text=text, logprobs=[])
            + self._say("content_part.done", **self._item, part=self._part(text))
            + self._say("output_item.done", output_index=0, item=self._message(response["status"], text))
            + self._say(response["status"], response=response)
        )

    def _final(self) -> dict[str, Any]:
        run, status = self.run, "incomplete" if self.run.finish == "length" else "completed"
        usage = {
            "input_tokens": run.prompt_tokens, "input_tokens_details": {"cached_tokens": run.cached_tokens},
            "output_tokens": len(run.output), "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": run.prompt_tokens + len(run.output),
        }  # fmt: skip
        response = self._response(status, [self._message(status, _text(run))], usage)
        return response if status == "completed" else response | {"incomplete_details": {"reason": "max_output_tokens"}}

    def whole(self) -> bytes:
        return _dump(self._final())

    @staticmethod
    def error(status: int, why: str) -> bytes:
        return _dump({"error": {"message": why, "type": "invalid_request_error", "param": None, "code": status}})

    @classmethod
    def error_event(cls, status: int, why: str) -> bytes:
        return _event({"type": "error", "code": str(status), "message": why, "param": None, "sequence_number": 0})


FORMATS: dict[str, type[Format]] = {
    "/v1/chat/completions": Chat, "/v1/completions": Completions, "/v1/messages": Messages, "/v1/responses": Responses,
}  # fmt: skip
