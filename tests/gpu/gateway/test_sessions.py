"""Which session a request belongs to: each signal of real clients, in order, and each trap."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from talaria.gpu.dialects import CHAT, MESSAGES, RESPONSES
from talaria.gpu.gateway.conversation import conversation
from talaria.gpu.gateway.sessions import LONGEST_ID, Session, session_of

UUID = "0b8d5f3e-8f7e-4a41-9a5f-2f6d6f1f0c11"


def session(headers: dict[str, str] | None = None, tenant: str = "t", root: bytes = b"root", **document: Any) -> Session:
    return session_of(tenant, CIMultiDict(headers or {}), document, root)


OF_CLAUDE_CODE = {"metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID})}}
OF_OLD_CLAUDE_CODE = {"metadata": {"user_id": f"user_{'ab' * 32}_account__session_{UUID}"}}

IN_ORDER: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("x-claude-code-session-id", {"X-Claude-Code-Session-Id": UUID}, {}),
    ("metadata.user_id", {}, OF_CLAUDE_CODE),
    ("metadata.user_id", {}, OF_OLD_CLAUDE_CODE),
    ("session-id", {"session-id": UUID}, {}),
    ("session_id", {"session_id": UUID}, {}),
    ("x-session-id", {"X-Session-Id": UUID}, {}),
    ("x-session-affinity", {"x-session-affinity": UUID}, {}),
    ("x-opencode-session", {"x-opencode-session": UUID}, {}),
    ("x-conversation-id", {"X-Conversation-ID": UUID}, {}),
    ("x-affinity", {"x-affinity": UUID}, {}),
    ("x-grok-conv-id", {"x-grok-conv-id": UUID}, {}),
    ("session_id", {}, {"session_id": UUID}),
    ("conversation", {}, {"conversation": UUID}),
    ("conversation", {}, {"conversation": {"id": UUID}}),
    ("conversation_id", {}, {"conversation_id": UUID}),
]


@pytest.mark.parametrize(("signal", "headers", "document"), IN_ORDER)
def test_each_client_names_its_session_in_its_own_way(signal: str, headers: dict[str, str], document: dict[str, Any]) -> None:
    found = session(headers, **document)
    assert found.signal == signal and found.explicit
    assert found.name == session({"x-session-id": UUID}).name


@pytest.mark.parametrize("better", range(len(IN_ORDER) - 1))
def test_an_earlier_signal_wins_over_a_later_one(better: int) -> None:
    signal, headers, document = IN_ORDER[better]
    _, other_headers, other_document = IN_ORDER[better + 1]
    worse = {name: "other" for name in other_headers if name.lower() not in {mine.lower() for mine in headers}}
    both = session({**worse, **headers}, **{**other_document, **document, "prompt_cache_key": "k"})
    assert both.signal == signal and both.name == session({"x-session-id": UUID}).name


def test_header_names_compare_without_case() -> None:
    assert session({"SESSION-ID": UUID}) == session({"Session-Id": UUID})


def test_ids_of_requests_and_messages_are_no_sessions() -> None:
    rotating = {"X-Request-ID": "r1", "X-Message-ID": "m1", "X-Conversation-Message-ID": "x"}
    assert session(rotating).signal == "root"


def test_what_is_no_session_in_metadata_is_left_alone() -> None:
    for user in ("user-17", "{broken", json.dumps({"session_id": 5}), json.dumps(["session_id"]), "user_x_session_short", 7, None, {}):
        assert session(metadata={"user_id": user}).signal == "root"
    assert session(metadata="text").signal == "root"


def test_a_prompt_cache_key_alone_does_not_join_conversations() -> None:
    one = session(prompt_cache_key="account", root=b"one")
    assert one.signal == "prompt_cache_key" and not one.explicit
    assert one == session(prompt_cache_key="account", root=b"one")
    assert one.name != session(prompt_cache_key="account", root=b"two").name


def test_without_any_id_the_conversations_root_is_the_session() -> None:
    assert session(root=b"one") == session(root=b"one")
    assert session(root=b"one").name != session(root=b"two").name


def test_a_tenants_id_never_reaches_anothers_session() -> None:
    for headers, document in (({"x-session-id": UUID}, {}), ({}, {"prompt_cache_key": "k"}), ({}, {})):
        assert session(headers, "t", **document).name != session(headers, "u", **document).name


def test_a_root_cannot_pose_as_an_id() -> None:
    assert session({"x-session-id": "root"}).name != session(root=b"root").name
    assert session({"x-session-id": "bc"}, tenant="a").name != session({"x-session-id": "c"}, tenant="ab").name


@pytest.mark.parametrize("value", ["", "   ", "a" * (LONGEST_ID + 1), "a\x00b", "line\nbreak", "\u202ereversed"])
def test_an_id_that_cannot_be_one_is_passed_over(value: str) -> None:
    assert session(session_id=value, conversation_id=UUID).signal == "conversation_id"


@given(st.text(max_size=300), st.text(max_size=300))
def test_names_are_bounded_and_show_nothing_of_the_id(tenant: str, value: str) -> None:
    found = session_of(tenant, CIMultiDict(), {"session_id": value}, b"")
    assert len(found.name) == 32 and set(found.name) <= set("0123456789abcdef")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "id"]), inner, max_size=4)
    ),
)
signals = st.sampled_from(["metadata", "conversation", "session_id", "prompt_cache_key", "conversation_id"])


@given(st.dictionaries(signals, json_values))
def test_any_document_has_a_session(document: dict[str, Any]) -> None:
    assert len(session_of("t", CIMultiDict(), document, b"r").name) == 32


# --- the root of a conversation --------------------------------------------------------------------------------------


def root(*messages: tuple[str, Any], system: Any = None, tools: Any = None) -> bytes:
    document = {"system": system, "tools": tools, "messages": [{"role": role, "content": content} for role, content in messages]}
    return conversation(MESSAGES, document).root


def test_the_whole_first_turn_counts_since_projects_share_its_head() -> None:
    shared = "<system-reminder>CLAUDE.md: " + "instructions of the project, the same for all. " * 50
    assert root(("user", shared + "fix the bug")) != root(("user", shared + "write a test"))


def test_the_root_stays_when_the_conversation_goes_on() -> None:
    first = (("user", "task"),)
    assert root(*first) == root(*first, ("assistant", "yes"), ("user", "go on")) != root(("user", "task"), ("user", "more"))


def test_the_system_prompt_belongs_to_the_root_and_tools_do_not() -> None:
    assert root(("user", "x"), system="a") != root(("user", "x"), system="b")
    assert root(("user", "x"), tools=[{"name": "a"}]) == root(("user", "x"), tools=[{"name": "b"}])


def test_cache_marks_and_the_form_of_text_change_nothing() -> None:
    marked = [{"type": "text", "text": "task", "cache_control": {"type": "ephemeral"}}]
    assert root(("user", "task")) == root(("user", marked)) == root(("user", [{"type": "text", "text": "task"}]))
    result = {"type": "tool_result", "tool_use_id": "1", "content": "ok"}
    assert root(("user", [result])) == root(("user", [{**result, "cache_control": {"type": "ephemeral"}}]))


def test_claude_codes_changing_first_block_is_no_part_of_the_root() -> None:
    def system(value: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": f"x-anthropic-billing-header: cch={value};"}, {"type": "text", "text": "You are an agent."}]

    assert root(("user", "x"), system=system("1")) == root(("user", "x"), system=system("2"))


def test_a_responses_input_has_the_root_of_what_stands_before_the_first_output() -> None:
    asked = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "task"}]},
    ]
    later = [*asked, {"type": "reasoning", "summary": []}, {"type": "function_call", "name": "f", "call_id": "1", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "1", "output": "ok"}]  # fmt: skip
    first, then = (conversation(RESPONSES, {"input": items, "instructions": "i"}) for items in (asked, later))
    assert first.root == then.root and then.is_output == [False, False, True, True, False] and then.outputs() == 1


def test_text_alone_is_one_user_turn() -> None:
    assert conversation(RESPONSES, {"input": "x"}).root == conversation(RESPONSES, {"input": [{"role": "user", "content": "x"}]}).root


@given(json_values)
def test_any_turns_make_a_conversation(turns: Any) -> None:
    for endpoint in (CHAT, RESPONSES, MESSAGES):
        made = conversation(endpoint, {"messages": turns, "input": turns, "system": turns, "instructions": turns, "tools": turns})
        assert len(made.hashes) == len(made.characters) == len(made.is_output)
