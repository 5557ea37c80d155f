"""The gateway's own OpenAPI document: what it reads of a request and what it can answer. Everything else is the engine's."""

from __future__ import annotations

from typing import Any

from talaria.gpu.dialects import CALLS, CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES, Endpoint

_TEXT = {"type": "string"}
_BLOCKS = {"type": "array", "items": {"type": "object", "properties": {"type": _TEXT, "text": _TEXT}, "required": ["type"]}}
_CONTENT = {"anyOf": [_TEXT, _BLOCKS]}
_OBJECT: dict[str, Any] = {"type": "object"}


def document() -> dict[str, Any]:
    paths: dict[str, Any] = {endpoint.path: {"post": _operation(endpoint)} for endpoint in (*CALLS, COUNT_TOKENS)}
    for path, summary in {
        "/health": "The process lives", "/ready": "Every model has a healthy instance", "/metrics": "Prometheus", "/v1/models": "Models",
    }.items():  # fmt: skip
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "ok"}, "default": {"description": "a problem"}}}}
    info = {"title": "Talaria", "version": "1", "description": "OpenAI and Anthropic endpoints over shared GPU groups"}
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"securitySchemes": schemes}}


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    schema = {"type": "object", "properties": _properties(endpoint), "required": ["model", endpoint.turns or "messages"]}
    return {
        "summary": endpoint.path,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "the engine's answer, or a stream of events"},
            "4XX": {"description": "refused, in the client's own error format"},
            "5XX": {"description": "overloaded or unreachable, with retry-after where trying again helps"},
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _properties(endpoint: Endpoint) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "model": _TEXT, "stream": {"type": "boolean"}, "max_tokens": {"type": "integer", "minimum": 1}, "metadata": _OBJECT,
        "session_id": _TEXT, "prompt_cache_key": _TEXT, "temperature": {"type": "number"}, "tools": {"type": "array", "items": _OBJECT},
    }  # fmt: skip
    message = {"type": "object", "properties": {"role": _TEXT, "content": _CONTENT}, "required": ["role"]}
    if endpoint in (CHAT, MESSAGES, COUNT_TOKENS):
        properties["messages"] = {"type": "array", "items": message}
    if endpoint in (MESSAGES, COUNT_TOKENS):
        properties["system"] = _CONTENT
    if endpoint is COMPLETIONS:
        ids = {"type": "array", "items": {"type": "integer", "minimum": 0}}
        properties["prompt"] = {"anyOf": [_TEXT, ids, {"type": "array", "items": _TEXT}]}
    if endpoint is RESPONSES:
        properties["input"] = {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]}
        properties["instructions"] = _TEXT
        properties["conversation"] = {"anyOf": [_TEXT, {"type": "object", "properties": {"id": _TEXT}}]}
        properties["previous_response_id"] = {"type": ["string", "null"]}
    return properties
