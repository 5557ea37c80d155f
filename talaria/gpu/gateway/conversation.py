"""What a request's body says about the conversation that it continues: a chain of hashes, one per item, and lengths.

An item is a message, an item of a Responses input, or a block of a raw prompt. Equal prefixes of two conversations have
equal hashes there, whatever a client changes without changing the words: text as a string or as a block, cache marks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import msgspec

from talaria.gpu.dialects import COMPLETIONS, RESPONSES, Endpoint

HASH_BYTES: Final = 12
BLOCK_CHARACTERS: Final = 256
"""Of a raw prompt: what is not at the end of a block is not told apart."""
BLOCK_TOKENS: Final = 64
IMAGE_CHARACTERS: Final = 4000
"""An image weighs as much text as this; its bytes are no characters."""
CHARACTERS_PER_TOKEN_ID: Final = 4
_IMAGES: Final = frozenset(("image", "image_url", "input_image", "input_audio", "document", "input_file", "file"))
_VOLATILE: Final = "x-anthropic-billing-header"
"""Claude Code's first system block starts so, with a value that changes from call to call."""

_PLAIN: Final = frozenset(("role", "content", "cache_control"))

_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Conversation:
    """``hashes[i]`` covers items 0..i, ``characters[i]`` counts theirs; ``root`` covers system and first turn."""

    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    is_output: list[bool] = field(default_factory=list)
    """Whether the item is what a model had said."""
    raw: bool = False
    """A prompt without turns: hashes are of blocks, outputs are not marked."""
    total_characters: int = 0

    @property
    def items(self) -> int:
        return len(self.hashes)

    def covers(self, items: int, digest: bytes) -> bool:
        """Whether the conversation begins with the ``items`` items that ``digest`` stands for."""
        return 0 < items <= len(self.hashes) and self.hashes[items - 1] == digest

    def output_end(self, items: int) -> int:
        """End of the run of outputs that begins after ``items`` items."""
        while items < len(self.is_output) and self.is_output[items]:
            items += 1
        return items

    def outputs(self) -> int:
        """Runs of outputs: turns that the conversation has had."""
        flags = self.is_output
        return sum(flag and not (i and flags[i - 1]) for i, flag in enumerate(flags))


def conversation(endpoint: Endpoint, document: dict[str, Any]) -> Conversation:
    """The conversation in a body. Takes anything; what has no meaning to a client has none here."""
    if endpoint is COMPLETIONS:
        return _raw(document.get("prompt"))
    system: list[Any] = []
    if endpoint is RESPONSES:
        system.append(document.get("instructions"))
    else:
        system.append(document.get("system"))
    turns = document.get(endpoint.turns or "")
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    return _of_turns(document.get("tools"), system, turns if isinstance(turns, list) else [])


def _of_turns(tools: Any, system: list[Any], turns: Iterable[Any]) -> Conversation:
    made = Conversation()
    seed = _hash(b"", _encode(tools)) if tools else b""
    length = len(_encode(tools)) if tools else 0
    parts: list[bytes] = []
    for item in system:
        length += _content(item, parts)
    said = _hash(b"", *parts)  # much of the whole as a rule: read once
    digest, root = _hash(seed, said), _hash(b"root", said)
    in_root = True
    for turn in turns:
        parts = []
        output, characters = _item(turn, parts)
        in_root = in_root and not output
        if in_root:
            said = _hash(b"", *parts)
            digest, root = _hash(digest, said), _hash(root, said)
        else:
            digest = _hash(digest, *parts)
        length += characters
        made.hashes.append(digest)
        made.characters.append(length)
        made.is_output.append(output)
    made.root, made.total_characters = root, length
    return made


def _item(item: Any, parts: list[bytes]) -> tuple[bool, int]:
    """Append what identifies the item to ``parts``; returns whether a model said it, and its characters."""
    if not isinstance(item, dict):
        return False, _content(item, parts)
    role, kind = item.get("role"), item.get("type")
    parts.append(role.encode() if isinstance(role, str) else b"")
    characters = _content(item.get("content"), parts)
    rest = {name: value for name, value in item.items() if name not in _PLAIN and value is not None} if item.keys() - _PLAIN else None
    if rest and rest != {"type": "message"}:
        text = _encode(rest)
        parts.append(text)
        characters += len(text)
    said = role == "assistant" or (not isinstance(role, str) and isinstance(kind, str) and not kind.endswith("_output"))
    return said, characters


def _content(content: Any, parts: list[bytes]) -> int:
    if content is None:
        return 0
    if isinstance(content, str):
        parts.append(content.encode())
        return len(content)
    if not isinstance(content, list):
        text = _encode(content)
        parts.append(text)
        return len(text)
    characters = 0
    for block in content:
        said = block.get("text") if isinstance(block, dict) else block
        if isinstance(said, str):
            if not said.startswith(_VOLATILE):
                parts.append(said.encode())
            characters += len(said)
            continue
        if isinstance(block, dict) and "cache_control" in block:
            block = {name: value for name, value in block.items() if name != "cache_control"}
        encoded = _encode(block)
        parts.append(encoded)
        image = isinstance(block, dict) and str(block.get("type")) in _IMAGES
        characters += IMAGE_CHARACTERS if image else len(encoded)
    return characters


def _raw(prompt: Any) -> Conversation:
    """A text or token ids in whole blocks; of several prompts the first."""
    while isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    made = Conversation(raw=True)
    digest = b""
    if isinstance(prompt, str):
        made.total_characters = len(prompt)
        blocks = [prompt[at : at + BLOCK_CHARACTERS].encode() for at in range(0, len(prompt), BLOCK_CHARACTERS)]
        size = BLOCK_CHARACTERS
    else:
        ids = _token_ids(prompt)
        made.total_characters = len(ids) * CHARACTERS_PER_TOKEN_ID
        blocks = [ids[at : at + BLOCK_TOKENS].tobytes() for at in range(0, len(ids), BLOCK_TOKENS)]
        size = BLOCK_TOKENS * CHARACTERS_PER_TOKEN_ID
    whole = made.total_characters // size
    for number, block in enumerate(blocks[:whole], 1):
        digest = _hash(digest, block)
        made.hashes.append(digest)
        made.characters.append(number * size)
    made.is_output = [False] * whole
    made.root = made.hashes[0] if whole else _hash(b"short", *blocks)
    return made


def _token_ids(prompt: Any) -> array[int]:
    try:
        return array("I", prompt if isinstance(prompt, list) else ())
    except (TypeError, OverflowError, ValueError):
        return array("I")


def _encode(value: Any) -> bytes:
    try:
        return _json(value)
    except (OverflowError, ValueError):
        return repr(value).encode()  # integers that no engine would take either


def _hash(seed: bytes, *parts: bytes) -> bytes:
    """Lengths belong to the hash: two parts are never one."""
    lengths = b",".join([b"%d" % len(part) for part in parts])
    return blake2b(b"".join((seed, lengths, b":", *parts)), digest_size=HASH_BYTES).digest()
