"""Which session a request belongs to: the signals of real clients, in order of trust.

Ids are untrusted: they are bounded, they count only under the API key that sent them, and only their hash goes anywhere.
An explicit id survives compaction, which rewrites the conversation; without one, the conversation's root is the session.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec

HEADERS: Final = (
    "session-id", "session_id", "x-session-id", "x-session-affinity", "x-opencode-session", "x-conversation-id", "x-affinity",
    "x-grok-conv-id",
)  # fmt: skip
"""After Claude Code's own signals. CodeBuddy also sends request and message ids, which change from call to call."""
CLAUDE_CODE: Final = "x-claude-code-session-id"
LONGEST_ID: Final = 256
_OLD_USER_ID: Final = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")


class Session(NamedTuple):
    """``name``: hash of tenant and id. ``signal``: where the id came from, ``root`` if the request has none."""

    name: str
    signal: str

    @property
    def explicit(self) -> bool:
        return self.signal not in ("root", "prompt_cache_key")


def session_of(tenant: str, headers: Mapping[str, str], document: Mapping[str, Any], root: bytes) -> Session:
    """The request's session. ``headers`` compares names without case; ``root`` identifies the conversation (``Conversation``)."""
    found = _explicit(headers, document)
    if found is not None:
        signal, value = found
        return Session(name_of(tenant, value), signal)
    hint = _text(document.get("prompt_cache_key"))
    if hint is not None:
        # One key may stand for a whole account: it is never enough without the conversation itself.
        return Session(_hash(tenant, "hint", hint.encode(), root), "prompt_cache_key")
    return Session(_hash(tenant, "root", root), "root")


def name_of(tenant: str, sent: str) -> str:
    """``Session.name`` of the id that a client of ``tenant`` sends."""
    return _hash(tenant, "id", sent.encode("utf-8", "replace"))


def _explicit(headers: Mapping[str, str], document: Mapping[str, Any]) -> tuple[str, str] | None:
    value = _text(headers.get(CLAUDE_CODE))
    if value is not None:
        return CLAUDE_CODE, value
    value = _of_metadata(document.get("metadata"))
    if value is not None:
        return "metadata.user_id", value
    for name in HEADERS:
        value = _text(headers.get(name))
        if value is not None:
            return name, value
    conversation = document.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    for name, found in (
        ("session_id", document.get("session_id")), ("conversation", conversation), ("conversation_id", document.get("conversation_id")),
    ):  # fmt: skip
        value = _text(found)
        if value is not None:
            return name, value
    return None


def _of_metadata(metadata: Any) -> str | None:
    """Claude Code's session in ``metadata.user_id``: a JSON text now, ``user_…_account_…_session_…`` before."""
    user = _text(metadata.get("user_id"), longest=4 * LONGEST_ID) if isinstance(metadata, dict) else None
    if user is None:
        return None
    if user.startswith("{"):
        try:
            document = msgspec.json.decode(user)
        except (msgspec.DecodeError, RecursionError):
            return None
        return _text(document.get("session_id"))
    old = _OLD_USER_ID.search(user)
    return old.group(1) if old else None


def _text(value: Any, longest: int = LONGEST_ID) -> str | None:
    """``value`` if it can be an id."""
    if not isinstance(value, str):
        return None
    value = value.strip()
    return value if value and len(value) <= longest and value.isprintable() else None


def _hash(tenant: str, kind: str, *parts: bytes) -> str:
    digest = blake2b(digest_size=16, person=b"talaria-session")
    for part in (tenant.encode(), kind.encode(), *parts):
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.hexdigest()
