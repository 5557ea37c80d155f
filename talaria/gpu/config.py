"""The cluster file: which engines run where, behind which endpoint, under which policy (``talaria.cluster/1``, YAML).

    schema: talaria.cluster/1
    name: one-group
    models:
      big: {path: /models/Qwen3-235B, tool_parser: qwen25, reasoning_parser: qwen3}
      other: {path: /models/GLM5-nvfp4}
    instances:
      - {name: group0, gpus: [0, 1, 2, 3, 4, 5, 6, 7], models: [big, other]}
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from talaria.errors import InputError, unknown_name
from talaria.validation import parse
from talaria.workload.reading import Name, Seconds

Port = Annotated[int, Field(ge=0, le=65535)]
PositiveSeconds = Annotated[Seconds, Field(gt=0)]
Names = Annotated[tuple[Name, ...], Field(strict=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Secret(_Strict):
    """A key: from an environment variable, or literally (for tests: files get copied)."""

    env: Name | None = None
    value: Name | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.env is None) == (self.value is None):
            raise ValueError("either env or value")
        return self

    def read(self, where: str) -> str:
        """Raises InputError where the environment variable is not set."""
        if self.value is not None:
            return self.value
        found = os.environ.get(self.env or "")
        if not found:
            raise InputError(f"environment variable {self.env} is not set", where=where, fix="export it before starting")
        return found


class Key(_Strict):
    """A client's bearer key, and what one client may hold at most."""

    name: Name
    key: Secret
    max_in_flight: Annotated[int, Field(ge=1)] = 256
    max_leases: Annotated[int, Field(ge=0)] = 4096


class Limits(_Strict):
    body_bytes: Annotated[int, Field(ge=1024)] = 32 * 2**20
    in_flight: Annotated[int, Field(ge=1)] = 4096
    call_deadline_s: PositiveSeconds = 3600.0
    """A call that has not ended by then is ended with an error."""
    keep_alive_s: PositiveSeconds = 10.0
    """A stream that has nothing to say says so this often, from its enqueue on."""
    session_idle_s: PositiveSeconds = 3600.0
    """A session is forgotten after this long without a call."""


class Gateway(_Strict):
    host: Name = "127.0.0.1"
    port: Port = 8400
    keys: tuple[Key, ...] = Field(default=(), strict=False)
    """None: everybody who reaches the port is the tenant ``default``; only allowed on loopback."""
    admin_key: Secret | None = None
    """None: no admin endpoints."""
    default_model: Name | None = None
    """Serves requests for models that nobody knows; None: they are refused."""
    aliases: dict[Name, Name] = Field(default_factory=dict)
    """Names that clients send, with ``*`` at the end for any ending: {"claude-*": "big"}."""
    limits: Limits = Limits()


class Model(_Strict):
    """A model by its served name."""

    path: Name
    family: Literal["mha", "mla", "recurrent"] = "mha"
    profile_model: Name | None = None
    """Its name in the profile; default: the served name."""
    tool_parser: Name | None = None
    reasoning_parser: Name | None = None
    kv_tokens: Annotated[int, Field(ge=1)] | None = None
    """Size of its KV pool; None: what the engine works out. State it where several models share a group."""
    arguments: Names = ()
    """Further command line arguments of its SGLang server."""
    environment: dict[Name, str] = Field(default_factory=dict)


class Instance(_Strict):
    """One TP group: engines started by an agent on this host, or, with ``url``, by one on another."""

    name: Name
    pool: Literal["cold", "hot"] = "cold"
    models: Annotated[Names, Field(min_length=1)]
    """The first is active at the start; a hot instance has one."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    """None on a machine without accelerators: the engines run on the CPU."""
    tp: Annotated[int, Field(ge=1)] = 1
    max_resident_models: Annotated[int, Field(ge=1)] = 8
    max_running: Annotated[int, Field(ge=1)] = 256
    host: Name = "127.0.0.1"
    port: Port = 0
    """Where its agent listens; 0: any free port, for agents that this gateway starts itself."""
    url: Name | None = None
    """An agent that is started on its own host: ``talaria-gpu serve CLUSTER --agent NAME`` there."""
    key: Secret | None = None
    """What the gateway shows to the agent; needed with ``url``."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.pool == "hot" and len(self.models) != 1:
            raise ValueError("exactly one model in a hot instance")
        if self.gpus and len(self.gpus) != self.tp:
            raise ValueError(f"as many gpus as tp says ({self.tp})")
        if self.url is not None and self.key is None:
            raise ValueError("a key beside url")
        return self


class Engine(_Strict):
    """What all engines started here have in common."""

    python: Name | None = None
    """Interpreter that has sglang and talaria installed; None: the running one."""
    arguments: Names = ()
    environment: dict[Name, str] = Field(default_factory=dict)
    page_tokens: Annotated[int, Field(ge=1)] = 64
    start_timeout_s: PositiveSeconds = 1800.0
    hang_s: PositiveSeconds = 120.0
    """An engine that runs calls and says nothing for this long is killed and started again."""
    log_dir: Name = "talaria-logs"


class Policy(_Strict):
    router: Name = "full"
    file: Name | None = None
    """A policy file, as ``talaria-sim tune`` writes it."""
    knobs: dict[str, Any] = Field(default_factory=dict)
    profile: Name | None = None
    """What policies believe of the models' timing until rounds correct it: a shipped profile or a file."""
    session_prefill: bool = True


class ClusterConfig(_Strict):
    schema_: Literal["talaria.cluster/1"] = Field(alias="schema")
    name: Name
    gateway: Gateway = Gateway()
    models: dict[Name, Model] = Field(min_length=1)
    instances: tuple[Instance, ...] = Field(min_length=1, strict=False)
    engine: Engine = Engine()
    policy: Policy = Policy()


def check(value: Any, where: str) -> ClusterConfig:
    """A cluster from a document. Raises InputError that names the field and what is allowed."""
    config = parse(ClusterConfig, value, where)
    names = [instance.name for instance in config.instances]
    for index, instance in enumerate(config.instances):
        if instance.name in names[:index]:
            raise InputError(f"instance {instance.name!r} is given twice", where=f"{where}: instances", allowed="each name once")
        for model in instance.models:
            if model not in config.models:
                raise unknown_name("model", model, config.models, where=f"{where}: instances[{index}].models")
    gateway = config.gateway
    for alias, model in [*gateway.aliases.items(), *([("default_model", gateway.default_model)] if gateway.default_model else [])]:
        if model not in config.models:
            raise unknown_name("model", model, config.models, where=f"{where}: gateway: {alias}")
    if not gateway.keys and gateway.host not in ("127.0.0.1", "::1", "localhost"):
        raise InputError(
            f"gateway.host = {gateway.host!r} without keys", where=where, allowed="127.0.0.1, or any address with gateway.keys",
            fix="add gateway.keys",
        )  # fmt: skip
    return config


def load(path: str | Path) -> ClusterConfig:
    """Raises InputError that names the file, the field and what is allowed."""
    from talaria.yamlfile import read_mapping

    fields = tuple(sorted(field.alias or name for name, field in ClusterConfig.model_fields.items()))
    return check(read_mapping(Path(path), fields), str(path))
