"""Whatever is sent, nothing is a 500, and every accepted call ends once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from talaria.gpu.gateway.openapi import document
from tests.gpu.gateway.fake import ADMIN, FakeAgent, rig

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
http = requests.Session()
schema = schemathesis.openapi.from_dict(document())
fuzz = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A gateway on a thread of its own, for clients that know no event loop."""
    address: list[str] = []
    started = threading.Event()
    stop: list[Any] = []

    async def serve() -> None:
        done = asyncio.Event()
        stop.extend((asyncio.get_running_loop(), done))
        async with rig(FakeAgent("a"), default_model="m") as made:
            address.append(made.url)
            started.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(60.0)
    try:
        yield address[0]
    finally:
        stop[0].call_soon_threadsafe(stop[1].set)
        thread.join(60.0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as at:
        yield at


def balanced(url: str) -> None:
    calls = http.get(f"{url}/admin/instances", headers=ADMIN, timeout=60.0).json()["calls"]
    assert calls["accepted"] == calls["completed"] + calls["failed"] + calls["shed"] + calls["open"]


@schema.parametrize()
@fuzz
def test_no_request_of_the_schema_or_beside_it_is_a_500(case: schemathesis.Case, url: str) -> None:
    answer = case.call(base_url=url, timeout=60.0, session=http)
    assert answer.status_code != 500, answer.text
    balanced(url)


FIELDS = st.sampled_from(["role", "content", "type", "text", "tools", "metadata", "user_id", "id"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | FIELDS, inner, max_size=4),
)
bodies = st.dictionaries(
    st.sampled_from(["model", "messages", "prompt", "input", "system", "stream", "metadata", "tools", "conversation", "prompt_cache_key"]),
    json_values,
)


@given(path=st.sampled_from(PATHS), body=bodies)
@fuzz
def test_no_json_is_a_500(url: str, path: str, body: Any) -> None:
    answer = http.post(url + path, json=_finite(body), timeout=60.0)
    assert answer.status_code != 500, answer.text
    if answer.status_code >= 400:
        assert "error" in answer.json()
    balanced(url)


@given(
    path=st.sampled_from(PATHS),
    body=st.binary(max_size=200),
    kind=st.sampled_from(["application/json", "text/plain", "multipart/form-data"]),
)
@fuzz
def test_no_bytes_are_a_500(url: str, path: str, body: bytes, kind: str) -> None:
    answer = http.post(url + path, data=body, headers={"content-type": kind}, timeout=60.0)
    assert answer.status_code in (200, 400, 404)


@given(
    name=st.sampled_from(["x-session-id", "authorization", "x-api-key", "content-encoding", "session_id", "x-claude-code-session-id"]),
    value=st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=300),
)
@fuzz
def test_no_header_is_a_500(url: str, name: str, value: str) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    answer = http.post(f"{url}/v1/chat/completions", data=body, headers={name: value.encode("latin-1")}, timeout=60.0)
    assert answer.status_code in (200, 400, 415)


def test_deep_and_wide_bodies_are_refused_or_served(url: str) -> None:
    for body in (b"[" * 100_000, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", b'{"model":"m","messages":' + b"1" * 5000 + b"}", b""):
        for path in PATHS:
            assert http.post(url + path, data=body, timeout=60.0).status_code in (200, 400)


def _finite(value: Any) -> Any:
    """What ``requests`` can write as JSON."""
    if isinstance(value, float):
        return value if value - value == 0.0 else 0.0
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
