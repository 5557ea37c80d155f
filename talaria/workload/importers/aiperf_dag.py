"""AIPerf's DAG datasets: conversations whose turns spawn or fork other conversations.

Mapping: a conversation that no turn names is a session; those that it spawns or forks, at any depth, are lines of it.
A child's first call waits for the turn that names it, and the parent's next turn waits for that turn and for the last
call of every child, then for ``delay`` (ms). A spawned child starts afresh, a forked one with its parent's history.
Tokens of messages are estimated from characters; ``max_tokens`` is the response.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from talaria.errors import InputError, unknown_name
from talaria.validation import parse
from talaria.workload.importers.assemble import (
    MAIN,
    UNNAMED_MODEL,
    RecordedCall,
    assemble,
    chars_of,
    output_or_typical,
    tokens_of_chars,
)
from talaria.workload.importers.report import Imported, ImportReport
from talaria.workload.reading import Milliseconds, Name, Record, Tokens, json_records


class _Message(Record):
    content: Any = ""


class _Turn(Record):
    messages: list[_Message] = Field(default_factory=list)
    model: Name | None = None
    max_tokens: Tokens | None = Field(None, validation_alias=AliasChoices("max_tokens", "output_length"))
    delay: Milliseconds = 0.0
    spawns: list[Name] = Field(default_factory=list)
    forks: list[Name] = Field(default_factory=list)


class _Conversation(Record):
    session_id: Name
    turns: list[_Turn] = Field(min_length=1)


def detects(first: Any) -> bool:
    if not isinstance(first, dict) or not isinstance(first.get("turns"), list):
        return False
    return any(isinstance(turn, dict) and "messages" in turn for turn in first["turns"])


def load(path: Path, report: ImportReport) -> Imported:
    graph: dict[str, _Conversation] = {}
    places: dict[str, str] = {}
    for where, value in json_records(path):
        conversation = parse(_Conversation, value, where)
        if conversation.session_id in graph:
            raise InputError(f"session_id = {conversation.session_id!r} appears twice", where=where, allowed="unique session ids")
        graph[conversation.session_id], places[conversation.session_id] = conversation, where
    children = _children(graph, places)
    roots = [name for name in graph if name not in children]
    sessions = [assemble(root, _Walk(graph, report).calls(root), report) for root in roots]
    return Imported(sessions, estimated=("prompt_tokens", "output_tokens", "reuse_tokens"))


def _children(graph: dict[str, _Conversation], places: dict[str, str]) -> set[str]:
    """Every conversation that a turn names; each must exist, have one parent and hang on a root."""
    parents: dict[str, str] = {}
    for name, conversation in graph.items():
        for child in (child for turn in conversation.turns for child in (*turn.spawns, *turn.forks)):
            if child not in graph:
                raise unknown_name("session_id in spawns or forks", child, graph, where=places[name])
            if child in parents:
                raise InputError(f"{child!r} is spawned twice", where=places[name], allowed="one parent for each conversation")
            parents[child] = name
    reached = [name for name in graph if name not in parents]
    for name in reached:  # grows while it is walked
        reached += [child for turn in graph[name].turns for child in (*turn.spawns, *turn.forks)]
    if circle := sorted(graph.keys() - set(reached)):
        raise InputError(f"{circle[0]!r} is spawned in a circle", where=places[circle[0]], allowed="trees of conversations")
    return set(parents)


class _Walk:
    """Depth first through one tree, so that every call comes after those that it waits for."""

    def __init__(self, graph: dict[str, _Conversation], report: ImportReport) -> None:
        self.graph, self.report = graph, report

    def calls(self, root: str) -> Iterator[RecordedCall]:
        stack = [self._conversation(root, None, (), 0)]
        while stack:  # not recursive: a tree may be deeper than the interpreter's stack
            item = next(stack[-1], None)
            if item is None:
                stack.pop()
            elif isinstance(item, RecordedCall):
                yield item
            else:
                stack.append(item)

    def _conversation(self, name: str, parent: str | None, after: tuple[str, ...], history_tokens: int) -> Iterator[Any]:
        """Calls of one conversation, and after each call an iterator for every conversation that it starts."""
        agent = name if parent else MAIN
        continues = after[0] if history_tokens else None
        for number, turn in enumerate(self.graph[name].turns):
            prompt_tokens = history_tokens + sum(tokens_of_chars(chars_of(message.content)) for message in turn.messages)
            output_tokens = output_or_typical(turn.max_tokens, self.report)
            key = f"{name}#{number}"
            yield RecordedCall(
                turn.model or UNNAMED_MODEL, prompt_tokens, output_tokens, agent, parent, gap_s=turn.delay / 1000.0,
                key=key, after=after, continues=continues,
            )  # fmt: skip
            history_tokens = prompt_tokens + output_tokens
            for child in turn.spawns:
                yield self._conversation(child, agent, (key,), 0)
            for child in turn.forks:
                yield self._conversation(child, agent, (key,), history_tokens)
            continues = None
            after = (key, *(f"{child}#{len(self.graph[child].turns) - 1}" for child in (*turn.spawns, *turn.forks)))
