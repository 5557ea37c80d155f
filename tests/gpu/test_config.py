"""The cluster file: what is wrong with it is said in one line, before anything starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from talaria.cli.gpu import serve
from talaria.errors import InputError
from talaria.gpu import config
from talaria.gpu.gateway.settings import Settings

DOCUMENT: dict[str, Any] = {
    "schema": "talaria.cluster/1",
    "name": "test",
    "gateway": {"keys": [{"name": "one", "key": {"value": "key-one"}}], "admin_key": {"value": "root"}},
    "models": {"m": {"path": "/nowhere"}, "n": {"path": "/nowhere"}},
    "instances": [{"name": "a", "models": ["m", "n"], "gpus": [0, 1], "tp": 2}, {"name": "b", "models": ["n"], "pool": "hot"}],
}


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    change(document)
    return document


def arena(document: dict[str, Any], **values: float) -> None:
    for model in document["models"].values():
        model.update(kv_tokens=1000)
    document["instances"][0].update(arena=values)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an instance twice": lambda d: d["instances"].append(d["instances"][0]),
    "a model twice in an instance": lambda d: d["instances"][0].update(models=["m", "m"]),
    "a GPU twice": lambda d: d["instances"][0].update(gpus=[0, 0]),
    "a GPU in two instances": lambda d: d["instances"][1].update(gpus=[1]),
    "a port twice": lambda d: [item.update(port=9000) for item in d["instances"]],
    "the gateway's port": lambda d: d["instances"][0].update(port=8400),
    "a hot instance of two models": lambda d: d["instances"][0].update(pool="hot"),
    "an instance that no log can be named after": lambda d: d["instances"][0].update(name="../a"),
    "an unknown router": lambda d: d.update(policy={"router": "x"}),
    "a key's name twice": lambda d: d["gateway"]["keys"].append({"name": "one", "key": {"value": "key-two"}}),
    "an alias of a model's name": lambda d: d["gateway"].update(aliases={"m": "n"}),
    "an alias with a star inside": lambda d: d["gateway"].update(aliases={"a*b": "n"}),
    "a number beyond all measure": lambda d: d["instances"][0].update(max_running=10**30),
    "more ranks than any group has": lambda d: d["instances"][0].update(tp=1025),
    "a host pool without room for a page": lambda d: d["instances"][0].update(host_kv_gib=1e-6),
    "a host pool beyond all measure": lambda d: d["instances"][0].update(host_kv_gib=1e9),
    "an arena of less than two chunks": lambda d: arena(d, managed_gib=0.02),
    "an arena of no end of chunks": lambda d: arena(d, managed_gib=100, chunk_kib=2048),
    "chunks that no GPU can map": lambda d: arena(d, managed_gib=1, chunk_kib=1024),
    "chunks that are no whole pages": lambda d: arena(d, managed_gib=1, chunk_kib=5),
    "an arena whose models take what they find": lambda d: d["instances"][0].update(arena={"managed_gib": 1}),
    "an arena with a recurrent model": lambda d: [arena(d, managed_gib=1), d["models"]["m"].update(family="recurrent")],
    "an arena that stages nothing": lambda d: arena(d, managed_gib=1, staging_gib_s=0),
    "an environment that no process can have": lambda d: d["models"]["m"].update(environment={"A=B": "c"}),
    "an argument that no process can have": lambda d: d["models"]["m"].update(arguments=["a\0b"]),
}


def test_an_arena_is_so_many_chunks() -> None:
    instance = config.check(changed(lambda d: arena(d, managed_gib=1.01, chunk_kib=4096)), "cluster.yaml").instances[0]
    assert instance.arena is not None
    assert (instance.arena.chunks, instance.arena.chunk_bytes) == (258, 4 * 2**20)


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_cluster_is_refused_in_one_line(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(InputError) as refused:
        config.check(changed(change), "cluster.yaml")
    assert "\n" not in str(refused.value) and "cluster.yaml" in str(refused.value)


@pytest.mark.parametrize("url", ["host", "ftp://host", "http://", "host:80", "http://host:99999", "http://host:x", "http://a b"])
def test_an_agent_has_an_address(url: str) -> None:
    with pytest.raises(InputError, match="http://HOST:PORT"):
        config.check(changed(lambda d: d["instances"][0].update(url=url, key={"value": "k"})), "cluster.yaml")


def test_the_cluster_itself_is_right() -> None:
    assert Settings(config.check(DOCUMENT, "cluster.yaml")).has_keys


@pytest.mark.parametrize("shown", ["two\nlines", " padded ", "schlüssel"])
def test_a_key_that_no_header_can_show_is_refused_and_not_repeated(shown: str) -> None:
    found = config.check(changed(lambda d: d["gateway"].update(admin_key={"value": shown})), "cluster.yaml")
    with pytest.raises(InputError, match="header") as refused:
        Settings(found)
    assert shown not in str(refused.value)


def test_a_key_stands_for_one_holder() -> None:
    for change in (
        lambda d: d["gateway"].update(admin_key={"value": "key-one"}),
        lambda d: d["gateway"]["keys"].append({"name": "two", "key": {"value": "key-one"}}),
    ):
        with pytest.raises(InputError, match="the same") as refused:
            Settings(config.check(changed(change), "cluster.yaml"))
        assert "key-one" not in str(refused.value)


@pytest.mark.parametrize("profile", ["nobodys", "/nowhere.json", "h200"])
def test_a_profile_that_agents_cannot_use_stops_the_gateway_before_it_starts(profile: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(changed(lambda d: d.update(policy={"profile": profile}))))
    with pytest.raises(InputError) as refused:
        CliRunner().invoke(serve.app, [str(file)], catch_exceptions=False, standalone_mode=False)
    assert "\n" not in str(refused.value)
