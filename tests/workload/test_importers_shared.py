"""Every importer on the public trace or schema example of its format: counts that were checked by hand or by another reading."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from talaria.workload.importers import detect, import_trace
from talaria.workload.importers.report import ImportReport
from talaria.workload.session import Session
from talaria.workload.stats import regime
from talaria.workload.trace import TraceFile

FILES = {
    "weka_traces_sample.jsonl.gz": ("weka", 24, 925),
    "mooncake_conversation_first3000.jsonl.gz": ("mooncake", 2178, 3000),
    "schema_examples/aiperf_mooncake_sessions.synthetic.jsonl": ("agentic-mooncake", 2, 3),
    "schema_examples/aiperf_multi_turn.synthetic.jsonl": ("aiperf-multi-turn", 1, 2),
    "schema_examples/aiperf_dag_jsonl.synthetic.jsonl": ("aiperf-dag", 1, 3),
    "schema_examples/claude_code_transcript.synthetic.jsonl": ("claude-code", 1, 3),
    "ccusage_fixtures/claude_session_alpha.jsonl": ("claude-code", 1, 3),
    "ccusage_fixtures/codex_session_alpha.jsonl": ("codex", 1, 2),
    "tracelab/codex_rollout_redacted.jsonl": ("codex", 1, 9),
    "tracelab/round_trace_sanitized.jsonl": ("tracelab", 2, 19),
    "lmcache_agent_trace.calls.jsonl.gz": ("lmcache-agent", 69, 1619),
    "sweagent_demo.calls.jsonl.gz": ("swe-agent", 21, 227),
    "azure_llm_2023_code.csv.gz": ("azure", 8819, 8819),
    "azure_llm_2023_conv.csv.gz": ("azure", 19366, 19366),
    "schema_examples/qwen_bailian.synthetic.jsonl": ("qwen-bailian", 2, 3),
    "schema_examples/burstgpt.synthetic.csv": ("burstgpt", 2, 3),
    "schema_examples/vllm_multi_turn_conversations.synthetic.json": ("vllm-multi-turn", 1, 2),
    "schema_examples/sglang_agentic_trace.synthetic.json": ("sglang-agentic", 1, 2),
    "schema_examples/dynamo_request_trace_v1.synthetic.jsonl": ("dynamo", 1, 2),
    "schema_examples/otel_genai_otlp.synthetic.json": ("otel-genai", 1, 2),
}
"""File to its format, sessions and calls."""

Importer = Callable[[str], TraceFile]


@pytest.fixture(scope="module")
def importer(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Importer:
    """Imports a shared file once, by its detected format."""
    folder = tmp_path_factory.mktemp("imported")

    def import_once(name: str) -> TraceFile:
        target = folder / f"{name.replace('/', '-')}.trace.jsonl"
        if not target.exists():
            import_trace(shared / "traces" / name, target, ImportReport())
        return TraceFile(target)

    return import_once


@pytest.mark.parametrize("name", FILES)
def test_a_public_file_is_recognised_and_imports_completely(shared: Path, importer: Importer, name: str) -> None:
    format_name, sessions, calls = FILES[name]
    trace = importer(name)
    assert detect(shared / "traces" / name).name == format_name
    assert len(list(trace.sessions())) == sessions
    assert sum(trace.header.models.values()) == calls


def weka_session(importer: Importer, name: str) -> Session:
    return next(session for session in importer("weka_traces_sample.jsonl.gz").sessions() if session.id == name)


def test_weka_totals_are_those_that_the_trace_states(shared: Path, importer: Importer) -> None:
    stated = {}
    with gzip.open(shared / "traces" / "weka_traces_sample.jsonl.gz") as file:
        for line in file:
            trace = json.loads(line)
            stated[trace["id"]] = trace["totals"]["combined_tokens"]
    for session in importer("weka_traces_sample.jsonl.gz").sessions():
        assert sum(call.prompt_tokens for call in session.calls) == stated[session.id]["input"]
        assert sum(call.output_tokens for call in session.calls) - stated[session.id]["output"] in (0, 1)  # one empty output counts as 1


def test_three_weka_subagents_that_run_at_once_are_waited_for_together(importer: Importer) -> None:
    session = weka_session(importer, "trace_0277")
    first_calls = [call for call in session.calls if call.spawned_by == 0]
    assert sorted(call.line for call in first_calls) == ["agent_001", "agent_002", "agent_003"]
    back = next(call for call in session.calls if call.line == "main" and call.turn == 1)
    lines = sorted(session.calls[index].line for index in back.waits_for)
    assert lines == ["agent_001", "agent_002", "agent_003", "main"]
    recorded_gap_s = 228.0 - 18.78  # what the parent saw: it holds the model time of all three
    last_end_s = 19.474 + 188.06
    assert back.gap_s == pytest.approx(228.0 - last_end_s, abs=0.01)
    assert back.gap_s < recorded_gap_s / 10


def test_weka_reuse_is_high_as_in_every_claude_code_trace(importer: Importer) -> None:
    share = regime(importer("weka_traces_sample.jsonl.gz"))["reusing_over_half"]
    assert 0.97 < share < 1.0


def test_a_codex_rollout_and_tracelabs_reading_of_the_same_session_agree(importer: Importer) -> None:
    rollout = next(importer("tracelab/codex_rollout_redacted.jsonl").sessions())
    rounds = next(session for session in importer("tracelab/round_trace_sanitized.jsonl").sessions() if "codex" in session.id)
    assert [(call.prompt_tokens, call.output_tokens, call.reuse_tokens) for call in rollout.calls] == [
        (call.prompt_tokens, call.output_tokens, call.reuse_tokens) for call in rounds.calls
    ]
    for ours, theirs in zip(rollout.calls, rounds.calls, strict=True):
        assert ours.gap_s == pytest.approx(theirs.gap_s, abs=0.01)


def test_the_claude_code_example_has_the_gap_of_its_tool(importer: Importer) -> None:
    main, side, back = next(importer("schema_examples/claude_code_transcript.synthetic.jsonl").sessions()).calls
    assert (main.prompt_tokens, main.output_tokens) == (14979, 144)
    assert (side.line, side.model, side.prompt_tokens) == ("sidechain-1", "model-b", 675)
    assert back.waits_for == (0,)
    assert back.gap_s == pytest.approx(0.39)


def test_mooncake_keeps_every_arrival_and_only_joins_what_shares_more_than_the_system_prompt(importer: Importer) -> None:
    trace = importer("mooncake_conversation_first3000.jsonl.gz")
    for session in trace.sessions():
        opening = session.calls[0].blocks[:2]
        assert all(call.blocks[:2] == opening for call in session.calls[1:])
        assert all(call.reuse_tokens >= 1024 for call in session.calls[1:])


def test_no_lmcache_gap_is_longer_than_the_time_between_its_arrivals(importer: Importer) -> None:
    for session in importer("lmcache_agent_trace.calls.jsonl.gz").sessions():
        for index, call in enumerate(session.calls):
            assert call.waits_for == ((index - 1,) if index else ())
            assert call.gap_s >= 0.0
