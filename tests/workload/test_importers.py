"""What every importer makes of a small recording of its format: lines, gaps, reuse, and a count of what it changed."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from talaria.errors import InputError
from talaria.workload.importers import FORMATS, detect, import_trace
from talaria.workload.importers.report import ImportReport
from talaria.workload.session import Session
from talaria.workload.trace import TraceFile
from tests.workload.recordings import CLAUDE_LINES, CLAUDE_USAGE, RECORDINGS, WEKA_TRACE, claude_line, dynamo_request, weka_request


class Import:
    """A text imported as one format: the sessions, the header and the report."""

    def __init__(self, folder: Path, name: str, content: str | Iterable[Any], **options: Any) -> None:
        source, target = folder / "recording", folder / "trace.jsonl"
        source.write_text(content if isinstance(content, str) else "".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")
        self.report = ImportReport()
        _, self.header = import_trace(source, target, self.report, format_name=name, **options)
        self.sessions: list[Session] = list(TraceFile(target).sessions())
        self.calls = self.sessions[0].calls

    def noted(self, words: str) -> int:
        return sum(count for what, count in self.report.notes.items() if words in what)


def imported(folder: Path, name: str, **options: Any) -> Import:
    return Import(folder, name, RECORDINGS[name], **options)


def test_every_format_of_the_contract_has_an_importer_and_a_recording() -> None:
    contract = (
        "talaria weka mooncake agentic-mooncake aiperf-multi-turn aiperf-dag claude-code codex tracelab lmcache-agent swe-agent azure "
        "qwen-bailian burstgpt vllm-multi-turn sglang-agentic dynamo otel-genai"
    )
    assert sorted(FORMATS) == sorted(contract.split()) == sorted(RECORDINGS)


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_recording_imports_and_its_format_is_told_from_the_content(tmp_path: Path, name: str) -> None:
    result = imported(tmp_path, name)
    assert detect(tmp_path / "recording").name == name
    assert result.report.sessions == len(result.sessions) > 0
    assert result.report.calls == sum(result.header.models.values())


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_gzip_recording_gives_the_same_sessions(tmp_path: Path, name: str) -> None:
    plain = imported(tmp_path, name).sessions
    packed = tmp_path / "recording.gz"
    packed.write_bytes(gzip.compress(RECORDINGS[name].encode()))
    import_trace(packed, tmp_path / "again.jsonl", ImportReport())
    assert list(TraceFile(tmp_path / "again.jsonl").sessions()) == plain


def test_a_subagents_model_time_is_not_part_of_its_parents_gap(tmp_path: Path) -> None:
    main, child, child_last, back = imported(tmp_path, "weka").calls
    assert (child.line, child.model, child.spawned_by, child.waits_for, child.gap_s) == ("agent_1", "small", 0, (0,), 1.0)
    assert child_last.gap_s == 3.0
    assert back.line == main.line == "main"
    assert back.waits_for == (0, 2)
    assert back.gap_s == 40.0 - 28.0  # after the subagent's last call, not after the parent's previous one (2 s)


def test_a_subagent_that_comes_back_after_the_next_call_does_not_hold_it_up(tmp_path: Path) -> None:
    trace: dict[str, Any] = copy.deepcopy(WEKA_TRACE)
    trace["requests"].insert(2, weka_request(10.0, "big", 704, 50))
    between, back = (call for call in Import(tmp_path, "weka", [trace]).calls if call.line == "main" and call.turn > 0)
    assert between.waits_for == (0,)
    assert len(back.waits_for) == 2


def test_a_subagent_that_is_back_before_the_previous_call_ended_is_not_waited_for_again(tmp_path: Path) -> None:
    trace: dict[str, Any] = copy.deepcopy(WEKA_TRACE)
    trace["requests"].insert(2, weka_request(20.0, "big", 704, 50, api_time=15.0))
    result = Import(tmp_path, "weka", [trace])
    assert (result.calls[3].line, result.calls[3].turn) == ("main", 1)
    assert (result.calls[4].waits_for, result.calls[4].gap_s) == ((3,), 5.0)


def test_an_unrecorded_duration_is_estimated_and_counted(tmp_path: Path) -> None:
    untimed = weka_request(10.0, "big", 704, 100, api_time=None)
    requests = [weka_request(0.0, "big", 640, 100), untimed, weka_request(30.0, "big", 768, 1)]
    result = Import(tmp_path, "weka", [{**WEKA_TRACE, "requests": requests}])
    assert result.noted("without a recorded duration") == 1
    pace_s = (2.0 + 2.0) / (100 + 1)  # of the two timed calls
    assert result.calls[2].gap_s == pytest.approx(20.0 - 100 * pace_s)
    assert "gap_s" in result.header.estimated


def test_a_prompt_that_keeps_every_block_also_keeps_the_response(tmp_path: Path) -> None:
    calls = imported(tmp_path, "weka").calls
    assert (calls[3].reuse_of, calls[3].reuse_tokens) == (0, 640 + 100)


def test_a_prompt_that_breaks_off_reuses_its_common_blocks_only(tmp_path: Path) -> None:
    rewritten = weka_request(40.0, "big", 1280, 50)
    rewritten["hash_ids"][4:] = range(500, 516)
    trace = {**WEKA_TRACE, "requests": [weka_request(0.0, "big", 640, 100), rewritten]}
    assert Import(tmp_path, "weka", [trace]).calls[1].reuse_tokens == 4 * 64


def test_an_agent_on_two_models_has_a_line_for_each_and_one_order(tmp_path: Path) -> None:
    requests = [weka_request(0, "big", 640, 9), weka_request(5, "small", 640, 9), weka_request(10, "big", 704, 9)]
    calls = Import(tmp_path, "weka", [{**WEKA_TRACE, "requests": requests}]).calls
    assert [(call.line, call.turn, call.waits_for) for call in calls] == [("main", 0, ()), ("main/small", 0, (0,)), ("main", 1, (1,))]
    assert calls[1].reuse_tokens == 0
    assert calls[2].reuse_of == 0


def test_weka_traces_of_one_file_share_a_block_size(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recording:2: block_size, hash_id_scope = 32, local"):
        Import(tmp_path, "weka", [WEKA_TRACE, {**WEKA_TRACE, "id": "other", "block_size": 32}])


def test_mooncake_sessions_are_rebuilt_from_prefix_chains(tmp_path: Path) -> None:
    result = imported(tmp_path, "mooncake")
    assert [len(session.calls) for session in result.sessions] == [2, 1]
    assert [session.start_s for session in result.sessions] == [0.0, 1.0]
    first, second = result.calls
    assert first.blocks == (0, 1)  # the partial last block is dropped
    assert (second.reuse_of, second.reuse_tokens, second.gap_s) == (0, 1250, 5.0)


def test_a_block_that_opens_every_prompt_joins_nothing(tmp_path: Path) -> None:
    rows = [{"timestamp": t, "input_length": 600, "output_length": 5, "hash_ids": [0, 100 + t]} for t in range(3)]
    assert len(Import(tmp_path, "mooncake", rows).sessions) == 3


def test_a_second_continuation_of_one_prompt_is_a_branch(tmp_path: Path) -> None:
    rows = [
        {"timestamp": t, "input_length": 512 * len(blocks), "output_length": 5, "hash_ids": blocks}
        for t, blocks in enumerate(([0, 1], [0, 1, 2], [0, 1, 7]))
    ]
    main, longer, branch = Import(tmp_path, "mooncake", rows).calls
    assert (main.line, longer.line, branch.line) == ("main", "main", "branch-1")
    assert branch.spawned_by is not None
    assert branch.reuse_tokens == 1024


def test_agentic_mooncake_delays_are_the_clients_own_gaps(tmp_path: Path) -> None:
    result = imported(tmp_path, "agentic-mooncake")
    assert [call.gap_s for call in result.calls] == [0.0, 0.39]
    assert "gap_s" not in result.header.estimated
    assert [session.start_s for session in result.sessions] == [0.0, 0.12]
    assert result.calls[1].blocks == (1, 2, 3)


def test_agentic_mooncake_rows_that_wait_for_each_other_are_one_session(tmp_path: Path) -> None:
    rows = [
        {"request_id": "a", "session_id": "planner", "timestamp": 100, "input_length": 600, "output_length": 5},
        {"request_id": "b", "session_id": "coder", "wait_for": ["a"], "delay": 20, "input_length": 300, "output_length": 5},
        {"request_id": "c", "session_id": "planner", "wait_for": ["a", "b"], "delay": 5, "tool_wait_ms": 300, "input_length": 900,
         "output_length": 5},
        {"request_id": "d", "session_id": "alone", "timestamp": 50, "input_length": 900, "output_length": 5},
    ]  # fmt: skip
    result = Import(tmp_path, "agentic-mooncake", rows)
    assert [session.id for session in result.sessions] == ["alone", "planner"]
    first, inner, back = result.sessions[1].calls
    assert (first.line, inner.line, inner.spawned_by, inner.waits_for, inner.gap_s) == ("main", "coder", 0, (0,), 0.02)
    assert (back.line, back.turn, back.waits_for, back.gap_s, back.reuse_of) == ("main", 1, (0, 1), 0.305, 0)


def test_the_agent_that_comes_first_names_the_session_whoever_waits(tmp_path: Path) -> None:
    rows = [
        {"request_id": "a", "session_id": "planner", "input_length": 600, "output_length": 5},
        {"request_id": "b", "session_id": "watcher", "input_length": 300, "output_length": 5},
        {"request_id": "c", "session_id": "planner", "wait_for": ["a", "b"], "input_length": 900, "output_length": 5},
    ]
    result = Import(tmp_path, "agentic-mooncake", rows)
    assert [session.id for session in result.sessions] == ["planner"]
    assert [call.line for call in result.calls] == ["main", "watcher", "main"]
    assert result.calls[2].waits_for == (0, 1)


def test_a_dependency_on_a_row_that_has_not_come_is_refused(tmp_path: Path) -> None:
    row = {"request_id": "a", "wait_for": ["b"], "input_length": 600, "output_length": 5}
    with pytest.raises(InputError, match=r"recording:1: wait_for = 'b'; allowed: request ids of earlier rows"):
        Import(tmp_path, "agentic-mooncake", [row])


def test_a_turn_known_by_its_arrival_only_has_an_estimated_gap(tmp_path: Path) -> None:
    rows = [{"session_id": "s", "timestamp": t, "input_length": 600, "output_length": 5} for t in (1000, 4000)]
    result = Import(tmp_path, "agentic-mooncake", rows)
    assert result.calls[1].gap_s == 3.0
    assert "gap_s" in result.header.estimated
    assert result.header.block_tokens == 0


def test_a_multi_turn_prompt_grows_by_its_history(tmp_path: Path) -> None:
    result = imported(tmp_path, "aiperf-multi-turn")
    assert [(call.prompt_tokens, call.output_tokens, call.gap_s) for call in result.calls] == [(100, 40, 0.0), (150, 145, 0.39)]
    assert result.noted("unknown length") == 1
    assert {"prompt_tokens", "output_tokens"} <= set(result.header.estimated)


def test_a_dag_parent_waits_for_all_children_and_a_fork_inherits_the_history(tmp_path: Path) -> None:
    root, fresh, forked, after = imported(tmp_path, "aiperf-dag").calls
    assert (fresh.line, fresh.model, fresh.waits_for, fresh.spawned_by, fresh.prompt_tokens) == ("fresh", "b", (0,), 0, 20)
    assert (forked.prompt_tokens, forked.reuse_of, forked.reuse_tokens) == (100 + 64 + 20, 0, 164)
    assert (after.line, after.turn, after.waits_for, after.gap_s) == (root.line, 1, (0, 1, 2), 0.39)


@pytest.mark.parametrize(
    ("spawns", "message"),
    [
        ({"a": ["b"], "b": ["a"]}, "in a circle"),
        ({"a": ["x"], "b": []}, "unknown session_id"),
        ({"a": ["b", "b"], "b": []}, "spawned twice"),
    ],
)
def test_a_dag_that_is_no_tree_is_refused(tmp_path: Path, spawns: dict[str, list[str]], message: str) -> None:
    lines = [{"session_id": name, "turns": [{"messages": [], "spawns": children}]} for name, children in spawns.items()]
    with pytest.raises(InputError, match=message):
        Import(tmp_path, "aiperf-dag", lines)


def test_claude_code_lines_of_one_message_are_one_call_with_its_last_usage(tmp_path: Path) -> None:
    result = imported(tmp_path, "claude-code")
    first = result.calls[0]
    assert (first.prompt_tokens, first.output_tokens) == (4 + 96 + 900, 144)
    assert result.noted("content blocks merged") == 1


def test_a_claude_code_sidechain_is_a_line_that_its_parent_waits_for(tmp_path: Path) -> None:
    main, side, back = imported(tmp_path, "claude-code").calls
    assert (side.line, side.model, side.spawned_by, side.waits_for) == ("sidechain-1", "small", 0, (0,))
    assert side.gap_s == pytest.approx(0.1)
    assert back.waits_for == (0, 1)
    assert back.gap_s == pytest.approx(0.5)  # 9.5 s less 9.0 s, where the sidechain ended; not 4.5 s after the main call
    assert (back.reuse_of, back.reuse_tokens) == (0, main.prompt_tokens + main.output_tokens)


def test_a_claude_code_compaction_reuses_what_the_cache_gave(tmp_path: Path) -> None:
    usage = {**CLAUDE_USAGE, "cache_read_input_tokens": 300}
    compacted = claude_line("assistant", "a4", "a3", 20.0, id="msg_4", model="big", usage=usage)
    last = Import(tmp_path, "claude-code", [*CLAUDE_LINES, compacted]).calls[-1]
    assert (last.prompt_tokens, last.reuse_tokens) == (400, 300)


def test_claude_code_messages_copied_into_a_resumed_session_count_once(tmp_path: Path) -> None:
    resumed = [{**line, "sessionId": "session-2"} for line in CLAUDE_LINES]
    new = {**claude_line("assistant", "b1", "a3", 20.0, id="msg_9", model="big", usage=CLAUDE_USAGE), "sessionId": "session-2"}
    result = Import(tmp_path, "claude-code", [*CLAUDE_LINES, *resumed, new])
    assert [len(session.calls) for session in result.sessions] == [3, 1]
    assert result.noted("copied from another session") == 4


def test_client_made_claude_code_messages_are_skipped_and_counted(tmp_path: Path) -> None:
    made_up = claude_line("assistant", "x", "a3", 20.0, id="m", model="<synthetic>", usage=CLAUDE_USAGE)
    result = Import(tmp_path, "claude-code", [*CLAUDE_LINES, made_up])
    assert len(result.calls) == 3
    assert result.noted("client-made or failed") == 1


def test_a_codex_call_runs_from_the_clients_last_word_to_the_models_last_item(tmp_path: Path) -> None:
    result = imported(tmp_path, "codex")
    assert result.sessions[0].id == "rollout-1"
    assert [(call.model, call.prompt_tokens, call.output_tokens) for call in result.calls] == [("gpt", 1000, 125), ("gpt", 1200, 20)]
    assert result.calls[1].gap_s == 2.0
    assert result.noted("repeated token counts") == 1


def test_a_tracelab_gap_is_the_time_of_its_tools(tmp_path: Path) -> None:
    calls = imported(tmp_path, "tracelab").calls
    assert calls[1].gap_s == 2.0
    assert calls[1].reuse_tokens == 1100


def test_lmcache_chains_are_lines_and_a_file_runs_one_call_at_a_time(tmp_path: Path) -> None:
    result = imported(tmp_path, "lmcache-agent")
    main, other, back = result.calls
    assert (main.line, other.line, back.line) == ("main", "chain-1", "main")
    assert (other.waits_for, back.waits_for) == ((0,), (1,))
    assert (main.prompt_tokens, back.reuse_tokens) == (1000, 1100)
    assert back.gap_s == pytest.approx(2.0 - 1.0)  # the fastest call took at most 1 s for the same 100 tokens
    assert "gap_s" in result.header.estimated


def test_a_swe_agent_tool_runs_before_the_next_call(tmp_path: Path) -> None:
    result = imported(tmp_path, "swe-agent")
    assert [call.gap_s for call in result.calls] == [0.0, 0.3, 0.0]
    assert [call.prompt_tokens for call in result.calls] == [1000, 1300, 1600]
    assert result.noted("without a recorded tool time") == 1
    assert "gap_s" in result.header.estimated


def test_a_swe_agent_trajectory_document_imports_as_one_session(tmp_path: Path) -> None:
    document = {
        "history": [{"role": "system", "content": "x" * 4000}, {"role": "assistant", "content": "y"}],
        "trajectory": [{"response": "r" * 400, "observation": "o" * 800, "execution_time": 0.3}, {"response": "r" * 4, "observation": ""}],
    }
    calls = Import(tmp_path, "swe-agent", json.dumps(document, indent=2)).calls
    assert [(call.prompt_tokens, call.output_tokens, call.gap_s) for call in calls] == [(1000, 100, 0.0), (1300, 1, 0.3)]


def test_azure_rows_are_single_calls_at_their_arrival(tmp_path: Path) -> None:
    result = imported(tmp_path, "azure")
    assert [session.start_s for session in result.sessions] == [0.0, pytest.approx(0.052)]
    assert result.header.models == {"model": 2}


def test_a_bailian_request_continues_its_parent_and_a_second_child_is_a_branch(tmp_path: Path) -> None:
    result = imported(tmp_path, "qwen-bailian")
    root, child, branch = result.calls
    assert (root.blocks, child.waits_for, child.line, child.reuse_tokens) == ((10, 11), (0,), "main", 60)
    assert (branch.line, branch.spawned_by, branch.reuse_of) == ("branch-3", 0, 1)
    assert branch.reuse_tokens == 32
    assert result.noted("whose parent is not in the trace") == 1


def test_burstgpt_elapsed_time_is_not_part_of_the_gap(tmp_path: Path) -> None:
    result = imported(tmp_path, "burstgpt")
    assert [session.id for session in result.sessions] == ["session-101", "request-2"]
    assert result.calls[1].gap_s == 45 - 5 - 2.5
    assert result.noted("empty outputs taken as 1 token") == 1


def test_a_vllm_conversation_has_a_call_for_each_answer(tmp_path: Path) -> None:
    calls = imported(tmp_path, "vllm-multi-turn").calls
    assert [(call.prompt_tokens, call.output_tokens) for call in calls] == [(10, 20), (35, 1)]


def test_an_sglang_response_is_what_the_prompt_grew_by_less_the_new_messages(tmp_path: Path) -> None:
    calls = imported(tmp_path, "sglang-agentic").calls
    assert [(call.prompt_tokens, call.output_tokens) for call in calls] == [(1200, 400), (1650, 400)]


def test_a_dynamo_gap_ends_where_the_next_request_is_received(tmp_path: Path) -> None:
    result = imported(tmp_path, "dynamo")
    assert result.calls[1].gap_s == 0.5
    assert result.calls[1].blocks == (11, 22, 33, -1, 55, 66)  # the same 64 bits, signed; the partial block is dropped
    assert result.header.block_scope == "global"


def test_dynamo_trajectories_are_lines_spawned_by_their_parent(tmp_path: Path) -> None:
    lines = [
        dynamo_request("run", 0, 1000, 256, [1, 2, 3, 4], trajectory_id="planner"),
        dynamo_request("run", 1500, 2000, 128, [8, 9], trajectory_id="coder", parent_trajectory_id="planner"),
        dynamo_request("run", 4000, 1000, 320, [1, 2, 3, 4, 5], trajectory_id="planner"),
    ]
    planner, coder, back = Import(tmp_path, "dynamo", lines).calls
    assert (planner.line, coder.line, coder.spawned_by) == ("planner", "coder", 0)
    assert (back.waits_for, back.gap_s) == ((0, 1), 0.5)


def test_an_otel_agent_below_a_tool_is_a_line_of_its_own(tmp_path: Path) -> None:
    main, inner, back = imported(tmp_path, "otel-genai").calls
    assert (main.line, inner.line, inner.model, inner.spawned_by) == ("main", "agent-4", "small", 0)
    assert (back.waits_for, back.gap_s) == ((0, 1), 1.5)


def test_an_overlap_on_one_line_runs_in_order_and_is_counted(tmp_path: Path) -> None:
    lines = [dynamo_request("run", 0, 5000, 256, []), dynamo_request("run", 1000, 1000, 256, [])]
    result = Import(tmp_path, "dynamo", lines)
    assert (result.calls[1].waits_for, result.calls[1].gap_s) == ((0,), 0.0)
    assert result.noted("began before the call they follow had ended") == 1


def test_duplicate_sessions_are_dropped_on_request_only_and_counted(tmp_path: Path) -> None:
    lines = [WEKA_TRACE, {**WEKA_TRACE, "id": "copy"}]
    assert len(Import(tmp_path, "weka", lines).sessions) == 2
    result = Import(tmp_path, "weka", lines, dedup=True)
    assert [session.id for session in result.sessions] == ["trace_1"]
    assert result.noted("same prompts and outputs") == 1
    assert (result.report.sessions, result.report.calls) == (1, 4)


def test_the_report_says_totals_first_and_then_every_count(tmp_path: Path) -> None:
    assert imported(tmp_path, "claude-code").report.lines() == [
        "1 session, 3 calls",
        "  3 records that are no model call (prompts, tool results, summaries) skipped",
        "  1 content blocks merged into the call of their message",
    ]


def test_a_malformed_record_is_refused_with_file_and_line_not_skipped(tmp_path: Path) -> None:
    broken = json.loads(RECORDINGS["mooncake"].splitlines()[1])
    del broken["input_length"]
    with pytest.raises(InputError, match=r"recording:2: missing field 'input_length'"):
        Import(tmp_path, "mooncake", RECORDINGS["mooncake"].splitlines()[0] + "\n" + json.dumps(broken))
    with pytest.raises(InputError, match=r"recording:3: 2 fields; allowed: 3, as in the header"):
        Import(tmp_path, "azure", "\n".join([*RECORDINGS["azure"].splitlines()[:2], "2023-11-16 18:17:04,5"]))
    with pytest.raises(InputError, match=r"recording:3: ContextTokens = 'x'"):
        Import(tmp_path, "azure", "\n".join([*RECORDINGS["azure"].splitlines()[:2], "2023-11-16 18:17:04,x,1"]))


def test_a_recording_without_a_model_call_is_refused_with_what_was_skipped(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recording: no model call in it \(1 records that are no model call"):
        Import(tmp_path, "claude-code", CLAUDE_LINES[:1])


def test_a_content_that_fits_no_format_is_refused_with_the_list_of_formats(tmp_path: Path) -> None:
    for content in ("hello\n", '{"a": 1}\n', "[1, 2]\n"):
        (tmp_path / "f").write_text(content)
        with pytest.raises(InputError, match=r"cannot be told.*weka.*give --format"):
            detect(tmp_path / "f")


def test_an_unknown_format_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown format 'claudecode'.*did you mean 'claude-code'"):
        Import(tmp_path, "claudecode", RECORDINGS["claude-code"])
