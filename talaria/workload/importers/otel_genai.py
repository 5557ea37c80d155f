"""OpenTelemetry spans with GenAI attributes, as OTLP JSON: one document, or one export per line.

Mapping: a span whose ``gen_ai.operation.name`` is a model operation is a call from its start to its end time. Calls
of one ``gen_ai.conversation.id`` (else of one trace) are a session. The nearest ``invoke_agent`` span above a
call is its line's agent, and the next one above that spawned it. Input tokens include those read from a cache, which bound
reuse after a rewrite; a prompt that grew is taken to continue the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from talaria.validation import parse
from talaria.workload.importers.assemble import MAIN, RecordedCall, assemble_all
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import MAX_SECONDS, Name, Record, Tokens, json_records

MODEL_OPERATIONS = ("chat", "text_completion", "generate_content")
AGENT_OPERATION = "invoke_agent"
INTEGER_TEXT = re.compile(r"-?[0-9]{1,20}")


def _integer(value: Any) -> Any:
    """OTLP JSON writes 64-bit integers as text."""
    return int(value) if isinstance(value, str) and INTEGER_TEXT.fullmatch(value) else value


Nanoseconds = Annotated[int, BeforeValidator(_integer), Field(ge=0, le=int(MAX_SECONDS) * 1_000_000_000)]
Integer = Annotated[int, BeforeValidator(_integer)]


class _Value(Record):
    stringValue: str | None = None
    intValue: Integer | None = None


class _Attribute(Record):
    key: str
    value: _Value


class _Span(Record):
    traceId: Name
    spanId: Name
    parentSpanId: str | None = None
    startTimeUnixNano: Nanoseconds
    endTimeUnixNano: Nanoseconds
    attributes: list[_Attribute] = Field(default_factory=list)


class _ScopeSpans(Record):
    spans: list[_Span] = Field(default_factory=list)


class _ResourceSpans(Record):
    scopeSpans: list[_ScopeSpans] = Field(default_factory=list)


class _Export(Record):
    resourceSpans: list[_ResourceSpans]


class _Usage(Record):
    """The attributes of a model span that make it a call."""

    model: Name
    input_tokens: Tokens = Field(alias="gen_ai.usage.input_tokens")
    output_tokens: Tokens = Field(alias="gen_ai.usage.output_tokens")
    cached_tokens: Tokens | None = Field(None, alias="gen_ai.usage.cache_read.input_tokens")
    conversation: Name | None = Field(None, alias="gen_ai.conversation.id")


def detects(first: Any) -> bool:
    return isinstance(first, dict) and "resourceSpans" in first


def load(path: Path, report: ImportReport) -> Imported:
    spans = {(span.traceId, span.spanId): (where, span, attributes) for where, span, attributes in _spans(path)}
    sessions: dict[str, list[RecordedCall]] = {}
    for where, span, attributes in spans.values():
        if attributes.get("gen_ai.operation.name") not in MODEL_OPERATIONS:
            report.note("spans that are no model call (agents, tools, others) skipped")
            continue
        model = attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model")
        usage = parse(_Usage, {**attributes, **({"model": model} if model else {})}, f"{where} span {span.spanId}")
        agent, parent = _agents(span, spans)
        sessions.setdefault(usage.conversation or span.traceId, []).append(
            RecordedCall(
                usage.model, usage.input_tokens, usage.output_tokens, agent, parent, start_s=span.startTimeUnixNano / 1e9,
                end_s=max(span.startTimeUnixNano, span.endTimeUnixNano) / 1e9, cached_tokens=usage.cached_tokens,
            )
        )  # fmt: skip
    return Imported(assemble_all(sessions, report), times=True, estimated=("reuse_tokens",))


Spans = dict[tuple[str, str], tuple[str, _Span, dict[str, Any]]]


def _spans(path: Path) -> Iterator[tuple[str, _Span, dict[str, Any]]]:
    for where, value in json_records(path):
        for resource in parse(_Export, value, where).resourceSpans:
            for scope in resource.scopeSpans:
                for span in scope.spans:
                    attributes = {item.key: item.value.stringValue or item.value.intValue for item in span.attributes}
                    yield where, span, {key: value for key, value in attributes.items() if value is not None}


def _agents(span: _Span, spans: Spans) -> tuple[str, str | None]:
    """The line of a call and that of the agent which invoked its agent: the outermost agent is the main line."""
    chain: list[str] = []
    seen = {span.spanId}
    above = spans.get((span.traceId, span.parentSpanId or ""))
    while above is not None and above[1].spanId not in seen:
        seen.add(above[1].spanId)
        if above[2].get("gen_ai.operation.name") == AGENT_OPERATION:
            chain.append(above[1].spanId)
        above = spans.get((above[1].traceId, above[1].parentSpanId or ""))
    names = [f"agent-{span_id}" for span_id in chain[:-1]] + [MAIN]
    return names[0], names[1] if len(names) > 1 else None
