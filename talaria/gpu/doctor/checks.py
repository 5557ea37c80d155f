"""Everything that would keep a cluster from running here, each with how to mend it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from talaria.errors import InputError
from talaria.gpu import modelfiles
from talaria.gpu.agent.beliefs import knobs_of
from talaria.gpu.config import KEPT_FAMILIES, Arena, ClusterConfig, Instance, Secret
from talaria.gpu.doctor.engine import EngineFacts
from talaria.gpu.doctor.machine import Gpu, port_is_free
from talaria.gpu.memory.slabs import SLAB_BYTES
from talaria.gpu.modelfiles import ModelFiles
from talaria.profiles import load as load_profile

GIB = 2**30
RUNTIME_SHARE = 0.1
"""Of a GPU's memory that weights and KV cannot have: activations, workspaces, graphs."""
FULL_SHARE = 0.9
USED_BYTES = GIB
"""What others may use of a GPU before it is worth a word."""
TABLE_BYTES = 4
"""Of each token that a request could have, in an engine's table of requests: the part of its runtime buffers that is known."""
OTHER_FILES = 1024
"""That an agent may have open beside the chunks of its arenas: calls, their engines, and what Python and the process began with."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks look at; tests make one up."""

    gpus: Sequence[Gpu]
    memory_bytes: int
    open_files: int
    """Limit of a process."""
    engine: EngineFacts


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["ok", "warn", "fail"]
    check: str
    what: str
    fix: str = ""


def examine(cluster: ClusterConfig, machine: Machine) -> list[Finding]:
    """In the order in which somebody would mend them. Instances with ``url`` are their own host's business."""
    here = [item for item in cluster.instances if item.url is None]
    files: dict[str, ModelFiles] = {}
    findings = [*_engine(machine.engine, any(item.gpus for item in here)), *_models(cluster, here, files)]
    findings += [*_parsers(cluster, machine.engine), *_gpus(here, machine), *_fit(cluster, here, files, machine)]
    findings += [*_host_memory(here, files, machine), *_host_kv(cluster, here, files), *_arenas(cluster, here, files, machine)]
    return [*findings, *_knobs(cluster), *_profile(cluster), *_keys(cluster), *_ports(cluster, here), *_clock(cluster)]


def _engine(engine: EngineFacts, on_gpus: bool) -> Iterator[Finding]:
    if engine.error:
        how = "pip install '.[gpu]'" if on_gpus else "scripts/setup-engine, for a CPU,"
        fix = f"install it there: {how} in a checkout, or name another engine.python"
        yield Finding("fail", "engine", f"{engine.python}: {engine.error}", fix)
    elif engine.version != engine.tested:
        yield Finding("warn", "engine", f"SGLang {engine.version}; tested with {engine.tested}", f"pip install sglang=={engine.tested}")
    else:
        yield Finding("ok", "engine", f"SGLang {engine.version}, all seams as expected")


def _models(cluster: ClusterConfig, here: Sequence[Instance], files: dict[str, ModelFiles]) -> Iterator[Finding]:
    for name in {name: None for item in here for name in item.models}:
        try:
            files[name] = found = modelfiles.read(cluster.models[name].path, f"models.{name}")
        except InputError as error:
            yield Finding("fail", f"model {name}", error.what, error.fix)
            continue
        if found.weight_bytes <= 1:
            yield Finding("warn", f"model {name}", "no weights beside config.json", "download the model completely")
        else:
            size = f"{found.weight_bytes / GIB:.1f} GiB of weights, {found.layers} layers, {found.kv_bytes_per_token:,} bytes of KV a token"
            yield Finding("ok", f"model {name}", size)


def _parsers(cluster: ClusterConfig, engine: EngineFacts) -> Iterator[Finding]:
    if engine.error:
        return
    known = {"tool_parser": engine.tool_parsers, "reasoning_parser": engine.reasoning_parsers}
    wrong = [
        (name, field, value)
        for name, model in cluster.models.items()
        for field in known
        if (value := getattr(model, field)) is not None and value not in known[field]
    ]
    for name, field, value in wrong:
        yield Finding("fail", f"model {name}", f"{field} {value!r} is unknown to SGLang", f"one of {', '.join(known[field])}")
    if not wrong:
        yield Finding("ok", "parsers", "all named parsers are known")


def _gpus(here: Sequence[Instance], machine: Machine) -> Iterator[Finding]:
    known = {gpu.number: gpu for gpu in machine.gpus}
    for item in here:
        if not item.gpus:
            level: Literal["ok", "warn"] = "warn" if machine.gpus else "ok"
            yield Finding(level, f"instance {item.name}", "runs on the CPU", "name its gpus" if machine.gpus else "")
            continue
        missing = [number for number in item.gpus if number not in known]
        if missing:
            there = f"this machine has {', '.join(map(str, known))}" if known else "nvidia-smi finds none here"
            yield Finding("fail", f"instance {item.name}", f"no GPU {missing[0]}", f"{there}; mend instances[].gpus or the driver")
            continue
        for number in item.gpus:
            if known[number].used_bytes > USED_BYTES:
                used = f"GPU {number} already holds {known[number].used_bytes / GIB:.1f} GiB"
                yield Finding("warn", f"instance {item.name}", used, "stop what runs there")
        names = {known[number].name for number in item.gpus}
        if len(names) > 1:
            yield Finding("warn", f"instance {item.name}", f"different GPUs: {', '.join(sorted(names))}", "use equal ones in a group")
        yield Finding("ok", f"instance {item.name}", f"{len(item.gpus)} × {min(names)}, driver {known[item.gpus[0]].driver}")


def _fit(cluster: ClusterConfig, here: Sequence[Instance], files: dict[str, ModelFiles], machine: Machine) -> Iterator[Finding]:
    """What the active model and the residue of the idle ones need of each GPU, where each engine has memory of its own."""
    known = {gpu.number: gpu for gpu in machine.gpus}
    residue = _residue_bytes(cluster)
    for item in (item for item in here if item.arena is None):
        models = [name for name in item.models if name in files]
        total = min((known[number].memory_bytes for number in item.gpus if number in known), default=0)
        if not models or not total:
            continue
        largest = max(models, key=lambda name: files[name].weight_bytes)
        weights = files[largest].weight_bytes / item.tp
        idle = min(len(item.models), item.max_resident_models) - 1
        most = 1 + max(0, int((total * (1.0 - RUNTIME_SHARE) - weights) // residue))
        where, per_gpu = f"instance {item.name}", f"{largest} takes {weights / GIB:.1f} of {total / GIB:.1f} GiB a GPU"
        rooms = {name: _room_tokens(files[name], item.tp, total, idle * residue) for name in models}
        if rooms[largest] <= 0:
            text = f"{per_gpu}, and each of {idle} idle models leaves {residue / GIB:.1f} GiB"
            yield Finding("fail", where, text, f"at most {most} models open here: lower max_resident_models, or use more GPUs")
            continue
        yield Finding("ok", where, f"{per_gpu}; about {rooms[largest]:,} tokens of KV beside {idle} idle models (at most {most} fit)")
        yield from _pools(cluster, item, rooms)


def _room_tokens(files: ModelFiles, tp: int, gpu_bytes: int, idle_bytes: int) -> int:
    """Tokens of KV that there is room for while the model is active."""
    free = gpu_bytes * (1.0 - RUNTIME_SHARE) - files.weight_bytes / tp - idle_bytes
    return int(free / max(1.0, files.kv_bytes_on_rank(tp)))


def _pools(cluster: ClusterConfig, item: Instance, rooms: dict[str, int]) -> Iterator[Finding]:
    """What the cluster file says of the sizes of KV pools."""
    for name, room in rooms.items():
        stated, where = cluster.models[name].kv_tokens, f"instance {item.name}"
        if stated is not None and stated > room:
            text = f"models.{name}.kv_tokens = {stated:,}, and there is room for about {max(0, room):,}: its pool will be smaller"
            yield Finding("warn", where, text, "lower it, or use more GPUs")
        elif stated is None and len(item.models) > 1:
            text = f"{name} shares the group and does not say kv_tokens: its engine takes all memory that is free when it starts"
            yield Finding("warn", where, text, f"state models.{name}.kv_tokens")


def _residue_bytes(cluster: ClusterConfig) -> int:
    """What every opened model keeps on each GPU, from the profile; else what was seen of large models."""
    if cluster.policy.profile is not None:
        try:
            return load_profile(cluster.policy.profile).hardware.residue_bytes
        except InputError:
            pass  # said by the check of the profile
    return load_profile("paper-tp8").hardware.residue_bytes


def _host_memory(here: Sequence[Instance], files: dict[str, ModelFiles], machine: Machine) -> Iterator[Finding]:
    """Idle models, and all of an arena, keep their weights in host memory, each instance its own, beside the KV kept over switches."""
    kept = (item for item in here if len(item.models) > 1 or item.arena is not None)
    images = sum(files[name].weight_bytes for item in kept for name in item.models if name in files)
    kv = sum(item.host_kv_bytes for item in here)
    arenas = sum(item.tp * item.arena.managed_gib * GIB for item in here if item.arena is not None and not item.gpus)
    parts = [f"{_size(images)} of weight images"]
    parts += [f"{_size(kv)} of KV (instances[].host_kv_gib)"] if kv else []
    parts += [f"{_size(arenas)} of arenas"] if arenas else []
    text = f"{' and '.join(parts)} in {_size(machine.memory_bytes)} of host memory"
    left = machine.memory_bytes - images - kv - arenas
    if left < 0:
        yield Finding("fail", "host memory", text, "serve fewer models here, lower host_kv_gib, or add memory")
    elif left < (1.0 - FULL_SHARE) * machine.memory_bytes:
        yield Finding("warn", "host memory", text, "little is left for the operating system")
    else:
        what = "the system" if kv else "instances[].host_kv_gib and the system"
        yield Finding("ok", "host memory", f"{text}; {_size(left)} left for {what}")


def _host_kv(cluster: ClusterConfig, here: Sequence[Instance], files: dict[str, ModelFiles]) -> Iterator[Finding]:
    """How much of a prefix the host pool keeps, by whole pages in whole slabs of each rank."""
    page_tokens = cluster.engine.page_tokens
    for item in (item for item in here if item.host_kv_bytes):
        pages = {}
        for name in item.models:
            if name in files and cluster.models[name].family in KEPT_FAMILIES:
                page_bytes = int(page_tokens * files[name].kv_bytes_on_rank(item.tp))
                pages[name] = page_bytes, item.host_kv_bytes // item.tp // SLAB_BYTES // -(-page_bytes // SLAB_BYTES)
        where, given = f"instance {item.name}", f"host_kv_gib keeps {_size(item.host_kv_bytes)} of KV"
        if not pages:
            yield Finding("warn", where, f"{given}, and none of its models has any that could be kept", "leave host_kv_gib out")
            continue
        name = min(pages, key=lambda name: pages[name][1])
        page_bytes, count = pages[name]
        if count == 0:
            text = f"{given}, less than one page of {name} ({page_tokens} tokens, {_size(page_bytes)} a rank)"
            yield Finding("fail", where, text, f"raise host_kv_gib, by far: its engine would not start (tp is {item.tp})")
        else:
            yield Finding("ok", where, f"{given}: about {count * page_tokens:,} tokens, if all are of {name}")


def _arenas(cluster: ClusterConfig, here: Sequence[Instance], files: dict[str, ModelFiles], machine: Machine) -> Iterator[Finding]:
    for item in here:
        if item.arena is not None:
            yield _arena_files(item, item.arena, machine)
            yield from _arena_room(cluster, item, item.arena, files, machine)
            yield from _arena_models(cluster, item, item.arena, files)


def _arena_files(item: Instance, arena: Arena, machine: Machine) -> Finding:
    """An agent has a file open for every chunk of every rank; a rank has those of its own."""
    needed = item.tp * arena.chunks + OTHER_FILES
    where, chunks = f"instance {item.name}", f"an arena of {item.tp} × {arena.chunks:,} chunks, for which its agent opens files"
    if needed > machine.open_files:
        text = f"{chunks}: up to {needed:,}, and {machine.open_files:,} are allowed"
        return Finding("fail", where, text, f"ulimit -Hn {needed} (LimitNOFILE={needed} of a service), or raise arena.chunk_kib")
    return Finding("ok", where, f"{chunks}: up to {needed:,}, as allowed")


def _arena_room(
    cluster: ClusterConfig, item: Instance, arena: Arena, files: dict[str, ModelFiles], machine: Machine
) -> Iterator[Finding]:  # fmt: skip
    """Whether each rank's device holds its arena, beside it what idle models leave, and once more the weights of a model that loads."""
    managed, idle, residue = arena.managed_gib * GIB, 0, 0
    device = usable = machine.memory_bytes / item.tp
    if item.gpus:
        device = min((gpu.memory_bytes for gpu in machine.gpus if gpu.number in item.gpus), default=0)
        usable = device * (1.0 - RUNTIME_SHARE)
        idle, residue = min(len(item.models), item.max_resident_models) - 1, _residue_bytes(cluster)
    kept = managed + idle * residue
    loading = max((files[name].weight_bytes / item.tp for name in item.models if name in files), default=0.0)
    if device and (kept > usable or kept + loading > device):
        left = f", {_size(residue)} of each of {idle} idle models" if idle else ""
        text = f"an arena of {_size(managed)} a rank{left}, and {_size(loading)} of weights while a model loads, in {_size(device)}"
        yield Finding("fail" if kept > usable else "warn", f"instance {item.name}", text, "lower arena.managed_gib")


def _arena_models(cluster: ClusterConfig, item: Instance, arena: Arena, files: dict[str, ModelFiles]) -> Iterator[Finding]:
    """Whether the arena holds what each model needs, and how much KV the largest could have."""
    where, managed, fits = f"instance {item.name}", arena.managed_gib * GIB, True
    weights = {name: files[name].weight_bytes / item.tp for name in item.models if name in files}
    tables = {name: (item.max_running + 1) * files[name].context_tokens * TABLE_BYTES for name in weights}
    for name, nbytes in weights.items():
        kv = _in_chunks((cluster.models[name].kv_tokens or 0) + cluster.engine.page_tokens, files[name], item.tp, arena)
        if nbytes + kv + tables[name] > managed:
            fits = False
            table = f"{_size(tables[name])} of table for {item.max_running} requests"
            parts = f"about {_size(nbytes)} of weights, {_size(kv)} of KV and {table}"
            fix = f"raise arena.managed_gib, or lower models.{name}.kv_tokens or max_running"
            yield Finding("warn", where, f"{parts} of {name} a rank, in an arena of {_size(managed)}", fix)
    if weights and fits:
        largest = max(weights, key=lambda name: weights[name])
        block = (managed - weights[largest] - tables[largest]) / _blocks(files[largest]) // arena.chunk_bytes * arena.chunk_bytes
        tokens = int(block * _blocks(files[largest]) / max(1.0, files[largest].kv_bytes_on_rank(item.tp)))
        text = f"{largest} takes {_size(weights[largest])} of the {_size(managed)} of the arena a rank"
        yield Finding("ok", where, f"{text}; about {tokens:,} tokens of KV beside it, less what workspaces take")


def _blocks(files: ModelFiles) -> int:
    """K and V of each layer; of latents it is half as many, and this says a little too much."""
    return 2 * files.layers


def _in_chunks(tokens: int, files: ModelFiles, ranks: int, arena: Arena) -> int:
    """Bytes of KV on a rank: each block takes whole chunks."""
    block = tokens * files.kv_bytes_on_rank(ranks) / _blocks(files)
    return -int(-block // arena.chunk_bytes) * arena.chunk_bytes * _blocks(files)


def _size(nbytes: float) -> str:
    """So that neither a pool of a TiB nor one of a MiB reads as none."""
    unit, name = (GIB, "GiB") if nbytes >= GIB / 10 else (2**20, "MiB") if nbytes >= 2**20 / 10 else (2**10, "KiB")
    return f"{nbytes / unit:.1f} {name}"


def _knobs(cluster: ClusterConfig) -> Iterator[Finding]:
    try:
        knobs_of(cluster.policy)
    except InputError as error:
        yield Finding("fail", "knobs", str(error), "mend policy.knobs, or the file that policy.file names")


def _profile(cluster: ClusterConfig) -> Iterator[Finding]:
    name = cluster.policy.profile
    if name is None:
        text = "no policy.profile: policies begin with orders of magnitude and learn from rounds"
        yield Finding("warn", "profile", text, "measure one: talaria-gpu profile CLUSTER -o FILE")
        return
    try:
        profile = load_profile(name)
        for model, settings in cluster.models.items():
            profile.model(settings.profile_model or model)
    except InputError as error:
        yield Finding("fail", "profile", str(error), "name models as the profile does with models.NAME.profile_model")
        return
    yield Finding("ok", "profile", f"{profile.name} ({profile.hash}) knows all models")


def _keys(cluster: ClusterConfig) -> Iterator[Finding]:
    secrets: list[tuple[str, Secret]] = [(f"gateway.keys: {key.name}", key.key) for key in cluster.gateway.keys]
    if cluster.gateway.admin_key is not None:
        secrets.append(("gateway.admin_key", cluster.gateway.admin_key))
    secrets += [(f"instances: {item.name}: key", item.key) for item in cluster.instances if item.key is not None]
    wrong = 0
    for where, secret in secrets:
        if secret.value is not None:
            yield Finding("warn", where, "stands in the file", "keep it in an environment variable: {env: NAME}")
        try:
            secret.read(where)
        except InputError as error:
            wrong += 1
            yield Finding("fail", where, error.what, error.fix)
    if cluster.gateway.admin_key is None:
        yield Finding("warn", "gateway.admin_key", "is not set: no drain, reload, reset or recording", "add admin_key: {env: NAME}")
    if not wrong:
        yield Finding("ok", "keys", f"{len(secrets)} keys are set")


def _ports(cluster: ClusterConfig, here: Sequence[Instance]) -> Iterator[Finding]:
    asked = [("gateway", cluster.gateway.host, cluster.gateway.port), *((f"instance {item.name}", item.host, item.port) for item in here)]
    for where, host, port in asked:
        if port and not port_is_free(host, port):
            yield Finding("fail", where, f"{host}:{port} cannot be listened on", "stop what runs there, or choose another port")
        elif port:
            yield Finding("ok", where, f"{host}:{port} is free")


def _clock(cluster: ClusterConfig) -> Iterator[Finding]:
    """Only several hosts have to agree; that they do the gateway says once they talk."""
    if any(item.url is not None for item in cluster.instances):
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        yield Finding("warn", "clock", f"it is {now} here; hosts must keep the same time", "run a time daemon on all of them")
    else:
        yield Finding("ok", "clock", "one host")
