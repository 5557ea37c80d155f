"""Prompts encoded piece by piece have the ids of the whole text; what was encoded before is not encoded again; memory is bounded."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.conftest import CPU

if importlib.util.find_spec("sglang") and not importlib.util.find_spec("triton"):
    sys.path.append(str(CPU / "standins"))
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
pytest.importorskip("sglang.srt.entrypoints.openai.parallel_prompt_encode", reason="sglang is not installed: scripts/setup-engine")

from tokenizers import Regex, normalizers, pre_tokenizers

from talaria.gpu import compat
from talaria.gpu.hooks import offload, tokenise
from talaria.gpu.hooks.tokenise import PieceCache
from tests.gpu.cpu import models

_GLM_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _like_qwen() -> Any:
    """Normalises text, but not its special tokens."""
    fast = models.tokenizer()
    fast._tokenizer.normalizer = normalizers.NFC()
    return fast


def _like_glm() -> Any:
    fast = models.tokenizer()
    words = pre_tokenizers.Split(Regex(_GLM_WORDS), "isolated")
    fast._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return fast


TINY = models.tokenizer()
TOKENIZERS = [TINY, _like_qwen(), _like_glm()]
SPECIAL = sorted(TINY.get_added_vocab())
_WORDS = ["fix", " the test", "it's", "123", "é", "e\u0301", "\u0301", "日本", "🙂", "<|im", "_start|>", "<", "think>", "a" * 70, " x" * 50]
_SPACES = ["\n", "  ", "\n\n", "\r\n", "\t"]
texts = st.lists(st.sampled_from([*SPECIAL, *_WORDS, *_SPACES]) | st.text(max_size=12), max_size=40).map("".join)


def _cuts(tokenizer: Any) -> compat.Cuts:
    cuts = compat.cuts(tokenizer)
    assert cuts is not None
    return cuts


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(TOKENIZERS), st.lists(texts, min_size=1, max_size=5), st.integers(200, 4000))
def test_ids_are_those_of_the_whole_text_whatever_came_before(tokenizer: Any, said: list[str], capacity_bytes: int) -> None:
    cache, cuts, text = PieceCache(capacity_bytes), _cuts(tokenizer), ""
    for more in said:
        text += more
        assert cache.encode(cuts, text) == tokenizer.encode(text)
        assert cache.encode(cuts, more) == tokenizer.encode(more)
        assert cache.bytes <= capacity_bytes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), texts), min_size=1, max_size=8))
def test_ids_of_a_growing_conversation_are_those_of_its_template(turns: list[tuple[str, str]]) -> None:
    cache, cuts = PieceCache(), _cuts(TINY)
    for end in range(1, len(turns) + 1):
        messages = [{"role": role, "content": content} for role, content in turns[:end]]
        text = TINY.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert cache.encode(cuts, text) == TINY.encode(text, add_special_tokens=False)


class _Counting:
    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.encoded_chars = 0

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.encoded_chars += sum(map(len, texts))
        return self._backend.encode_batch(texts, **options)


def test_a_call_of_a_line_encodes_only_what_is_new() -> None:
    cuts, cache = _cuts(TINY), PieceCache()
    backend = _Counting(cuts.backend)
    counting = compat.Cuts(backend, cuts.adds_specials, cuts.spans)
    turns = [f"<|im_start|>user\n{'read the file ' * 50}{n}<|im_end|>\n" for n in range(20)]
    cache.encode(counting, "".join(turns[:19]))
    before = backend.encoded_chars
    cache.encode(counting, "".join(turns))
    assert backend.encoded_chars - before < 2 * len(turns[19])


def test_a_tokenizer_that_adds_special_tokens_itself_is_asked_for_the_whole_text() -> None:
    from tokenizers.processors import TemplateProcessing

    from tests.gpu.cpu.models import tokenizer

    adding = tokenizer()
    adding._tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", pair="$A $B", special_tokens=[("<|endoftext|>", adding.pad_token_id)]
    )
    text = "<|im_start|>user\nfix the failing test<|im_end|>\n" * 9
    whole = tokenise._encode(lambda encoder, words, options: encoder.encode(words, **(options or {})), adding, text)
    assert whole == adding.encode(text) and whole[0] == adding.pad_token_id
    assert tokenise._encode(None, adding, text, {"add_special_tokens": False}) == adding.encode(text, add_special_tokens=False)  # type: ignore[arg-type]


class _Chat:
    def __init__(self) -> None:
        self.threads: list[int] = []

    def _convert_to_internal_request(self, request: str, raw_request: None) -> tuple[str, str]:
        self.threads.append(threading.get_ident())
        if request == "wrong":
            raise ValueError("wrong")
        return request, request


class _Endpoint:
    def __init__(self) -> None:
        self.openai_serving_chat = _Chat()

    async def handle(self, chat_request: str, request: str, raw_request: None) -> tuple[str, str]:
        return self.openai_serving_chat._convert_to_internal_request(chat_request, raw_request)

    async def count(self, request: str) -> int:
        self.openai_serving_chat._convert_to_internal_request(request, None)
        return len(request)


def test_messages_are_rendered_and_encoded_in_another_thread() -> None:
    async def check() -> None:
        endpoint = _Endpoint()
        assert await offload._message(_Endpoint.handle, endpoint, "text", "", None) == ("text", "text")
        assert await offload._whole(_Endpoint.count, endpoint, "text") == 4
        with pytest.raises(ValueError, match="wrong"):
            await offload._message(_Endpoint.handle, endpoint, "wrong", "", None)
        assert len(endpoint.openai_serving_chat.threads) == 3
        assert threading.get_ident() not in endpoint.openai_serving_chat.threads

    asyncio.run(check())
