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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from talaria.errors import InputError, unknown_name
from talaria.policy.router import ROUTERS
from talaria.validation import parse
from talaria.workload.reading import Name, Seconds

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1, le=2**31)]
PositiveSeconds = Annotated[Seconds, Field(gt=0)]
Word = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""What a process can be given."""
Names = Annotated[tuple[Annotated[Word, Field(min_length=1)], ...], Field(strict=False)]
Variables = dict[Annotated[str, Field(pattern=r"^[^\x00=]+$")], Word]
FileName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Of an instance: logs are named after it."""


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and " " not in text and (parts.port or 0) >= 0:
            return text
    except ValueError:
        pass
    raise ValueError("http://HOST:PORT")


def _alias(text: str) -> str:
    if "*" in text[:-1]:
        raise ValueError("a name, or the beginning of names with * at its end")
    return text


LEAST_POOL_GIB = 0.001
KEPT_FAMILIES = ("mha", "mla")
"""Whose KV a host pool takes."""
MOST_CHUNKS = 16_384
"""Of an arena: each is an open file in the agent."""
GPU_CHUNK_KIB = 2048
"""What a GPU can map."""
Url = Annotated[Name, AfterValidator(_url)]
Alias = Annotated[Name, AfterValidator(_alias)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def header_value(key: str, where: str) -> str:
    """``key``, which is not repeated. Raises InputError for what no HTTP header can show."""
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise InputError("the key cannot be sent in a header", where=where, allowed="printable ASCII without spaces around it")
    return key


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
        """Raises InputError where the environment variable is not set, or for what no HTTP header can show."""
        found = self.value if self.value is not None else os.environ.get(self.env or "")
        if not found:
            raise InputError(f"environment variable {self.env} is not set", where=where, fix="export it before starting")
        return header_value(found, where)


class Key(_Strict):
    """A client's bearer key, and what one client may hold at most."""

    name: Name
    key: Secret
    max_in_flight: Count = 256
    max_leases: Annotated[int, Field(ge=0)] = 4096


class Limits(_Strict):
    body_bytes: Annotated[int, Field(ge=1024)] = 32 * 2**20
    in_flight: Count = 4096
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
    aliases: dict[Alias, Name] = Field(default_factory=dict)
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
    kv_tokens: Count | None = None
    """Size of its KV pool; None: what the engine works out. State it where several models share a group."""
    arguments: Names = ()
    """Further command line arguments of its SGLang server."""
    environment: Variables = Field(default_factory=dict)


class Arena(_Strict):
    """Device memory that all models of an instance share: weights, KV and runtime buffers of the active one, the next one's weights."""

    managed_gib: Annotated[float, Field(gt=0, le=2**20)]
    """On each rank, for weights, KV and runtime buffers. While a model loads, its weights are once more beside it."""
    chunk_kib: Annotated[int, Field(ge=4, le=2**21, multiple_of=4)] = 16 * 1024
    """What is mapped and staged as a whole."""
    staging_gib_s: Annotated[float, Field(gt=0)] | None = None
    """How fast a rank copies the next one's weights at the most; none: as the profile says on GPUs, without limit on the CPU."""
    check: bool = False
    """At every switch compare the weights with their host image, and fill KV with what is no number: slow, to find faults."""

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_kib * 1024

    @property
    def chunks(self) -> int:
        return int(self.managed_gib * 2**30) // self.chunk_bytes

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not 2 <= self.chunks <= MOST_CHUNKS:
            raise ValueError(f"managed_gib of 2 to {MOST_CHUNKS} chunks, not {self.chunks}")
        return self


class Instance(_Strict):
    """One TP group: engines started by an agent on this host, or, with ``url``, by one on another."""

    name: FileName
    pool: Literal["cold", "hot"] = "cold"
    models: Annotated[Names, Field(min_length=1)]
    """The first is active at the start; a hot instance has one."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    """None on a machine without accelerators: the engines run on the CPU."""
    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    max_resident_models: Count = 8
    max_running: Count = 256
    host_kv_gib: Annotated[float, Field(ge=0, le=2**20)] = 0.0
    """Host memory in GiB that keeps KV of all its models over switches; 0: none does."""
    arena: Arena | None = None
    """Shared memory of its models' weights and KV; None: each engine has its own, which SGLang gives back and copies again."""
    host: Name = "127.0.0.1"
    port: Port = 0
    """Where its agent listens; 0: any free port, for agents that this gateway starts itself."""
    url: Url | None = None
    """An agent that is started on its own host: ``talaria-gpu serve CLUSTER --agent NAME`` there."""
    key: Secret | None = None
    """What the gateway shows to the agent; needed with ``url``."""

    @property
    def host_kv_bytes(self) -> int:
        return int(self.host_kv_gib * 2**30)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.pool == "hot" and len(self.models) != 1:
            raise ValueError("exactly one model in a hot instance")
        if self.gpus and len(self.gpus) != self.tp:
            raise ValueError(f"as many gpus as tp says ({self.tp})")
        if len(set(self.models)) < len(self.models) or len(set(self.gpus)) < len(self.gpus):
            raise ValueError("each model and each GPU once")
        if 0 < self.host_kv_gib < LEAST_POOL_GIB * self.tp:
            raise ValueError(f"host_kv_gib of 0, or {LEAST_POOL_GIB} and more for each of the {self.tp} ranks")
        if self.arena is not None and self.gpus and self.arena.chunk_kib % GPU_CHUNK_KIB:
            raise ValueError(f"arena.chunk_kib in multiples of {GPU_CHUNK_KIB} on GPUs")
        if self.url is not None and self.key is None:
            raise ValueError("a key beside url")
        return self


class Engine(_Strict):
    """What all engines started here have in common."""

    python: Name | None = None
    """Interpreter that has sglang and talaria installed; None: the running one."""
    arguments: Names = ()
    environment: Variables = Field(default_factory=dict)
    page_tokens: Count = 64
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


def is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "::1", "localhost")


def check(value: Any, where: str) -> ClusterConfig:
    """A cluster from a document. Raises InputError that names the field and what is allowed."""
    config = parse(ClusterConfig, value, where)
    gateway = config.gateway
    for index, instance in enumerate(config.instances):
        for model in instance.models:
            if model not in config.models:
                raise unknown_name("model", model, config.models, where=f"{where}: instances[{index}].models")
            if instance.arena is not None:
                _check_arena(model, config.models[model], f"{where}: instances[{index}].arena")
    for alias, model in [*gateway.aliases.items(), *([("default_model", gateway.default_model)] if gateway.default_model else [])]:
        if model not in config.models:
            raise unknown_name("model", model, config.models, where=f"{where}: gateway: {alias}")
        if alias in config.models:
            raise InputError(f"alias {alias!r} is a model's name", where=f"{where}: gateway.aliases", allowed="names that no model has")
    if config.policy.router not in ROUTERS:
        raise unknown_name("router", config.policy.router, ROUTERS, where=f"{where}: policy.router")
    _check_once("instance", [item.name for item in config.instances], f"{where}: instances")
    _check_once("key", [key.name for key in gateway.keys], f"{where}: gateway.keys")
    here = [item for item in config.instances if item.url is None]
    _check_once("GPU", [gpu for item in here for gpu in item.gpus], f"{where}: instances of this host")
    _check_once("port", [port for port in (gateway.port, *(item.port for item in here)) if port], where)
    if not gateway.keys and not is_loopback(gateway.host):
        raise InputError(
            f"gateway.host = {gateway.host!r} without keys", where=where, allowed="127.0.0.1, or any address with gateway.keys",
            fix="add gateway.keys",
        )  # fmt: skip
    return config


def _check_arena(name: str, model: Model, where: str) -> None:
    if model.kv_tokens is None:
        raise InputError(f"model {name!r} states no kv_tokens", where=where, fix="add kv_tokens: its KV has to fit into the arena")
    if model.family == "recurrent":
        raise InputError(f"model {name!r} is recurrent", where=where, allowed="models of family mha or mla")


def _check_once(kind: str, found: Sequence[str | int], where: str) -> None:
    twice = next((value for value, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{kind} {twice!r} is given twice", where=where, allowed=f"each {kind} once")


def load(path: str | Path) -> ClusterConfig:
    """Raises InputError that names the file, the field and what is allowed."""
    from talaria.yamlfile import read_mapping

    fields = tuple(sorted(field.alias or name for name, field in ClusterConfig.model_fields.items()))
    return check(read_mapping(Path(path), fields), str(path))
