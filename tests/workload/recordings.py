"""A small recording of every importable format, written by hand, and what importing it must give."""

from __future__ import annotations

import json
from typing import Any


def _lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def weka_request(t: float, model: str, prompt: int, out: int, first_hash: int = 1, api_time: float | None = 2.0) -> dict[str, Any]:
    blocks = list(range(first_hash, first_hash + prompt // 64))
    request = {"t": t, "type": "n", "model": model, "in": prompt, "out": out, "hash_ids": blocks}
    return request if api_time is None else {**request, "api_time": api_time}


WEKA_TRACE = {
    "id": "trace_1", "models": ["big"], "block_size": 64, "hash_id_scope": "local",
    "requests": [
        weka_request(0.0, "big", 640, 100),
        {"t": 30.0, "type": "subagent", "agent_id": "agent_1", "duration_ms": 27000,
         "requests": [weka_request(0.0, "small", 128, 10, 900), weka_request(5.0, "small", 256, 10, 900, api_time=20.0)]},
        weka_request(40.0, "big", 1280, 50),
    ],
}  # fmt: skip
"""The main call ends at 2 s; the subagent runs from 3 s, its last call ends at 28 s, its result is back at 30 s."""

CLAUDE_USAGE = {"input_tokens": 4, "cache_creation_input_tokens": 96, "cache_read_input_tokens": 900, "output_tokens": 1}


def claude_line(kind: str, uuid: str, parent: str | None, second: float, *, sidechain: bool = False, **message: Any) -> dict[str, Any]:
    return {
        "type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "session-1", "isSidechain": sidechain,
        "timestamp": f"2026-01-01T00:00:{second:06.3f}Z", "message": {"role": kind, **message},
    }  # fmt: skip


CLAUDE_LINES = [
    claude_line("user", "u1", None, 0.0, content="x"),
    claude_line("assistant", "a1", "u1", 4.0, id="msg_1", model="big", usage=CLAUDE_USAGE),
    claude_line("assistant", "a2", "a1", 5.0, id="msg_1", model="big", usage={**CLAUDE_USAGE, "output_tokens": 144}),
    claude_line("user", "s0", None, 5.1, sidechain=True, content="x"),
    claude_line("assistant", "s1", "s0", 9.0, sidechain=True, id="msg_2", model="small", usage=CLAUDE_USAGE),
    claude_line("user", "u2", "a2", 9.5, content=[{"type": "tool_result"}]),
    claude_line("assistant", "a3", "u2", 12.0, id="msg_3", model="big", usage={**CLAUDE_USAGE, "cache_creation_input_tokens": 396}),
]


def codex_line(second: float, kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": f"2026-01-01T00:00:{second:06.3f}Z", "type": kind, "payload": payload}


def codex_usage(second: float, prompt: int, cached: int, output: int, total: int) -> dict[str, Any]:
    usage = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": output}
    info = {"last_token_usage": usage, "total_token_usage": {"total_tokens": total}}
    return codex_line(second, "event_msg", type="token_count", info=info)


def dynamo_request(session: str, received_ms: float, total_ms: float, prompt: int, hashes: list[int], **context: Any) -> dict[str, Any]:
    return {
        "schema": "dynamo.request.trace.v1", "event_type": "request_end", "agent_context": {"session_id": session, **context},
        "request": {
            "model": "m", "input_tokens": prompt, "output_tokens": 40, "cached_tokens": 0, "request_received_ms": received_ms,
            "total_time_ms": total_ms, "replay": {"trace_block_size": 64, "input_sequence_hashes": hashes},
        },
    }  # fmt: skip


def otel_span(span: str, parent: str, operation: str, start_s: float, end_s: float, **numbers: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"gen_ai.operation.name": {"stringValue": operation}, "gen_ai.conversation.id": {"stringValue": "c1"}}
    if operation == "chat":
        values["gen_ai.request.model"] = {"stringValue": numbers.pop("model", "m")}
    values |= {f"gen_ai.usage.{name.replace('__', '.')}": {"intValue": str(value)} for name, value in numbers.items()}
    return {
        "traceId": "t1", "spanId": span, "parentSpanId": parent, "startTimeUnixNano": str(int(start_s * 1e9)),
        "endTimeUnixNano": str(int(end_s * 1e9)), "attributes": [{"key": key, "value": value} for key, value in values.items()],
    }  # fmt: skip


OTEL = {"resourceSpans": [{"scopeSpans": [{"spans": [
    otel_span("1", "", "invoke_agent", 0, 20),
    otel_span("2", "1", "chat", 0, 2, input_tokens=1000, output_tokens=50),
    otel_span("3", "1", "execute_tool", 2, 9),
    otel_span("4", "3", "invoke_agent", 3, 8),
    otel_span("5", "4", "chat", 3, 8, model="small", input_tokens=200, output_tokens=20),
    otel_span("6", "1", "chat", 9.5, 12, input_tokens=1500, output_tokens=60),
]}]}]}  # fmt: skip

RECORDINGS: dict[str, str] = {
    "talaria": _lines(
        {"schema": "talaria.trace/1", "name": "t", "models": {"m": 2}},
        {"session": "s", "calls": [{"model": "m", "prompt_tokens": 100, "output_tokens": 10},
                                   {"model": "m", "turn": 1, "prompt_tokens": 150, "output_tokens": 5, "gap_s": 0.5, "waits_for": [0]}]},
    ),
    "weka": _lines(WEKA_TRACE),
    "mooncake": _lines(
        {"timestamp": 0, "input_length": 1200, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 1000, "input_length": 1300, "output_length": 50, "hash_ids": [0, 9, 10]},
        {"timestamp": 5000, "input_length": 2000, "output_length": 0, "hash_ids": [0, 1, 3, 4]},
    ),
    "agentic-mooncake": _lines(
        {"session_id": "s1", "timestamp": 0, "input_length": 1024, "output_length": 40, "hash_ids": [1, 2]},
        {"session_id": "s1", "delay": 390, "input_length": 1700, "output_length": 52, "hash_ids": [1, 2, 3, 4]},
        {"session_id": "s2", "timestamp": 120, "input_tokens": 900, "output_tokens": 10, "request_id": "r1"},
        {"session_id": "s3", "wait_for": ["r1"], "tool_wait_ms": 40, "input_tokens": 500, "output_tokens": 10},
    ),
    "aiperf-multi-turn": _lines(
        {"session_id": "s1", "turns": [{"text": "x" * 400, "output_length": 40}, {"text": "y" * 40, "delay": 390}]},
    ),
    "aiperf-dag": _lines(
        {"session_id": "root", "turns": [
            {"messages": [{"role": "user", "content": "x" * 400}], "model": "a", "max_tokens": 64, "spawns": ["fresh"],
             "forks": ["forked"]},
            {"messages": [{"role": "user", "content": "y" * 40}], "model": "a", "max_tokens": 8, "delay": 390}]},
        {"session_id": "fresh", "turns": [{"messages": [{"role": "user", "content": "z" * 80}], "model": "b", "max_tokens": 32}]},
        {"session_id": "forked", "turns": [{"messages": [{"content": [{"text": "z" * 80}]}], "model": "a", "max_tokens": 4}]},
    ),
    "claude-code": _lines(*CLAUDE_LINES),
    "codex": _lines(
        codex_line(0, "session_meta", id="rollout-1"),
        codex_line(0, "turn_context", model="gpt"),
        codex_line(1, "event_msg", type="user_message"),
        codex_line(3, "response_item", type="reasoning"),
        codex_line(4, "response_item", type="function_call"),
        codex_usage(4.1, 1000, 250, 125, 1125),
        codex_usage(4.2, 1000, 250, 125, 1125),
        codex_line(6, "response_item", type="function_call_output"),
        codex_line(9, "response_item", type="message", role="assistant"),
        codex_usage(9.1, 1200, 1000, 20, 2345),
    ),
    "tracelab": _lines(*(
        {"session_id": "s1", "model": "m", "input_tokens_total": prompt, "prefix_tokens": 900, "output_tokens": 100, "timing_events": [
            {"event_type": "tool_result", "timestamp": f"2026-01-01T00:00:{start:02}Z"},
            {"event_type": "text", "timestamp": f"2026-01-01T00:00:{start + 4:02}Z"}]}
        for prompt, start in ((1000, 10), (1500, 16))
    )),
    "lmcache-agent": _lines(*(
        {"agent": "a", "file": "f", "session": chain, "t0_us": 1_000_000, "k": 0, "t": t, "prompt_chars": prompt, "output_chars": 400,
         "shared_prefix_chars": shared}
        for chain, t, prompt, shared in (("c", 0.0, 4000, 0), ("d", 1.0, 800, 0), ("c", 3.0, 6000, 4000))
    )),
    "swe-agent": _lines(*(
        {"traj": "t", "k": k, "first_prompt_chars": 4000, "response_chars": 400, "observation_chars": 800,
         "tool_exec_s": 0.3 if k == 0 else None}
        for k in range(3)
    )),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n",
    "qwen-bailian": _lines(
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 20, "hash_ids": [10, 11, 12]},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 9.5, "input_length": 75, "output_length": 31, "hash_ids": [10, 11, 13, 14, 15]},
        {"chat_id": 3, "parent_chat_id": 1, "timestamp": 9.75, "input_length": 70, "output_length": 31, "hash_ids": [10, 11, 20, 21, 22]},
        {"chat_id": 5, "parent_chat_id": 4, "timestamp": 10.0, "input_length": 33, "output_length": 8, "hash_ids": [30, 31, 32]},
    ),
    "burstgpt": "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                "5,101,2.5,ChatGPT,472,18,490,Conversation log\n"
                "45,101,6.0,ChatGPT,1087,0,1087,Conversation log\n"
                "118,,4.44,GPT-4,417,276,693,API log\n",
    "vllm-multi-turn": json.dumps([{"id": "c1", "messages": [
        {"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 80},
        {"role": "user", "content": "x" * 20}, {"role": "assistant", "content": "y" * 4}]}], indent=1),
    "sglang-agentic": json.dumps({"metadata": {}, "conversations": [[
        {"messages": [{"role": "user", "content": "task"}], "prompt_tokens": 1200},
        {"messages": [{"role": "user", "content": "x" * 200}], "prompt_tokens": 1650}]]}, indent=1),
    "dynamo": _lines(
        dynamo_request("run-1", 100_000, 3000, 256, [11, 22, 33, 2**64 - 1]),
        {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {"duration_ms": 440.0}},
        dynamo_request("run-1", 103_500, 1000, 420, [11, 22, 33, 2**64 - 1, 55, 66, 77]),
    ),
    "otel-genai": json.dumps(OTEL, indent=1),
}  # fmt: skip
