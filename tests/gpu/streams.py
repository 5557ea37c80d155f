"""What a client reads from an answer, without what differs between two runs of the same request."""

from __future__ import annotations

import json
from typing import Any

_IDS = {"id", "created", "created_at", "completed_at", "item_id", "call_id", "sequence_number", "system_fingerprint", "metadata"}
_TEXT = {"content", "reasoning_content", "reasoning", "arguments", "text", "delta", "partial_json", "thinking"}
"""Keys whose strings arrive in pieces."""


def events(body: str) -> list[dict[str, Any]]:
    """The data of a server-sent event stream, ``[DONE]`` as ``{"done": True}``."""
    data = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [{"done": True} if text == "[DONE]" else json.loads(text) for text in data]


def essence(body: str, stream: bool) -> tuple[Any, dict[str, Any]]:
    """Skeletons of the events, repeated ones once, and all text (and logprobs) by place, pieces joined. Both without ids and times."""
    pieces: dict[str, Any] = {}
    skeletons: list[Any] = []
    for event in events(body) if stream else [json.loads(body)]:
        skeleton = _strip(event, str(event.get("type", "")), pieces)
        if not skeletons or skeletons[-1] != skeleton:
            skeletons.append(skeleton)
    return skeletons, pieces


def _strip(value: Any, place: str, pieces: dict[str, Any]) -> Any:
    if isinstance(value, list):
        places = [item.get("index", at) if isinstance(item, dict) else at for at, item in enumerate(value)]
        return [_strip(item, f"{place}[{at}]", pieces) for at, item in zip(places, value, strict=True)]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, item in value.items():
        if key in _IDS:
            continue
        if key == "logprobs" and item:
            listed = item if isinstance(item, list) else item.get("content") or item.get("token_logprobs")
            pieces.setdefault(f"{place}.{key}", []).extend(listed)
        elif key in _TEXT and isinstance(item, str):
            pieces[f"{place}.{key}"] = pieces.get(f"{place}.{key}", "") + item
        elif key not in _TEXT or item is not None:
            kept[key] = _strip(item, f"{place}.{key}", pieces)
    return kept
