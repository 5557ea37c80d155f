"""The stub's language: a token is four bytes of text, so that token ids, as uint32, are the padded text itself.

Every message is padded by itself and an output token is four letters: the history that a client sends back has the very tokens
that were generated.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Any

TOKEN_BYTES = 4
ANSWER = b"<as>"
"""The end of a prompt made of messages."""
_SYLLABLES = [a + b for a in "bdfgklmn" for b in "aeiou"]
WORDS = [f" {syllable}{letter}".encode() for syllable in _SYLLABLES for letter in "lmnrst"]


def tokens(text: str) -> bytes:
    """Token ids as uint32, little endian."""
    body = text.encode("utf-8", "surrogatepass")
    return body + b"\0" * (-len(body) % TOKEN_BYTES)


def seed_of(prompt: bytes, before: int = 0) -> int:
    """What all output after ``prompt`` follows from: greedy, so nothing else matters. ``before``: the seed of what goes before it."""
    return zlib.crc32(prompt, before)


def word(seed: int, position: int) -> bytes:
    """The output token at ``position``."""
    return WORDS[(seed + 37 * position) % len(WORDS)]


def said(seed: int, count: int) -> str:
    """The first ``count`` output tokens."""
    return b"".join([word(seed, position) for position in range(count)]).decode()


def answer(prompt: bytes, count: int) -> str:
    """The first ``count`` output tokens after ``prompt``."""
    return said(seed_of(prompt), count)


def flatten(content: Any) -> str:
    """All text in a message's content, whatever the blocks are called."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(map(flatten, content))
    if isinstance(content, dict):
        return "".join(flatten(content[name]) for name in sorted(content) if name not in ("type", "cache_control"))
    return "" if content is None else str(content)


def turn(role: str, content: Any) -> bytes:
    """A message in a prompt."""
    return b"<%s>" % role.encode()[:2].ljust(2, b"_") + tokens(flatten(content)) + b"<en>"


def render(messages: list[tuple[str, Any]]) -> bytes:
    """The prompt of a conversation of (role, content)."""
    return b"".join([turn(role, content) for role, content in messages]) + ANSWER


def prompt_of(path: str, body: dict[str, Any]) -> bytes:
    """The prompt of a request's body. Raises ValueError for what the real engine refuses."""
    if path == "/v1/completions":
        prompt = body["prompt"]
        ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        return array("I", prompt).tobytes() if ids else tokens(flatten(prompt))
    if path == "/v1/responses":
        given = body["input"]
        turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
        head = [("system", body["instructions"])] if body.get("instructions") else []
    else:
        turns = body["messages"]
        head = [("system", body["system"])] if body.get("system") else []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("messages: a list of objects")
    return render([*head, *((str(turn.get("role", "tool")), turn.get("content", turn)) for turn in turns)])
