"""Profile files: what is read is what was written, every number has its provenance, and a mistake is one clear line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from talaria.errors import InputError
from talaria.profiles import load, names
from talaria.profiles.schema import ProfileFile
from talaria.validation import parse

PROVENANCES = {"measured", "published", "fitted", "assumed"}


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(load("paper-tp8").file.document())


def quantities(document: dict[str, Any]) -> list[tuple[str, Any]]:
    tables = {"hardware": document["hardware"], **document["models"]}
    return [
        (f"{table}.{field}", value) for table, fields in tables.items() for field, value in fields.items() if not isinstance(value, str)
    ]


def test_the_profiles_that_scenarios_name_are_shipped() -> None:
    assert set(names()) >= {"paper-tp8", "paper-tp4", "b200", "h200"}


@pytest.mark.parametrize("name", names())
def test_every_number_of_a_shipped_profile_has_provenance_and_source(name: str) -> None:
    found = quantities(load(name).file.document())
    assert len(found) > 30
    for where, quantity in found:
        assert quantity["provenance"] in PROVENANCES, where
        assert quantity["source"].strip(), where


@pytest.mark.parametrize("name", names())
def test_a_written_profile_reads_back_the_same(name: str, tmp_path: Path) -> None:
    profile = load(name)
    copied = tmp_path / "copy.json"
    copied.write_text(profile.file.text(), encoding="utf-8")
    assert load(str(copied)) == profile


def test_the_hash_ignores_the_order_of_fields_and_sees_every_value(document: dict[str, Any], tmp_path: Path) -> None:
    def hash_of(changed: dict[str, Any]) -> str:
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(changed))
        return load(str(path)).hash

    shuffled = {key: document[key] for key in reversed(document)}
    assert hash_of(shuffled) == load("paper-tp8").hash
    document["hardware"]["restore_base_s"]["value"] += 0.001
    assert hash_of(document) != load("paper-tp8").hash


def _set(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        document = document[parent]
    document[last] = value


MISTAKES = [
    ("hardware/tp/value", -3, "hardware.tp.value = -3", "greater than or equal to 1"),
    ("hardware/tp/value", 1025, "hardware.tp.value = 1025", "less than or equal to 1024"),
    ("hardware/restore_base_s/value", 1e308, "hardware.restore_base_s.value = 1e+308", "less than or equal to 1000000000"),
    ("hardware/h2d_bytes_per_s/value", 5e-324, "hardware.h2d_bytes_per_s.value = 5e-324", "greater than or equal to 1"),
    ("hardware/h2d_bytes_per_s/value", float("nan"), "hardware.h2d_bytes_per_s.value = nan", "a finite number"),
    ("hardware/bump_fraction/value", 1.5, "hardware.bump_fraction.value = 1.5", "less than or equal to 1"),
    ("hardware/tp/value", "8", "hardware.tp.value = '8'", "a valid integer"),
    ("hardware/tp", 8, "hardware.tp is not an object", "provenance, source, value"),
    ("hardware/tp/provenance", "guessed", "hardware.tp.provenance = 'guessed'", "'measured', 'published', 'fitted' or 'assumed'"),
    ("hardware/tp/source", "", "hardware.tp.source", "at least 1 character"),
    ("hardware/hbm_byte", {}, "unknown field 'hardware.hbm_byte'", "did you mean 'hbm_bytes'?"),
    ("hardware/tp/vlaue", 8, "unknown field 'hardware.tp.vlaue'", "did you mean 'value'?"),
    ("hardware/hbm_bytes/value", 10**400, "hardware.hbm_bytes.value = 1000", f"less than or equal to {2**60}"),
    ("models/Qwen3-235B/family", "gqa", "models.Qwen3-235B.family = 'gqa'", "'mha', 'mla' or 'recurrent'"),
    ("models/Qwen3-235B/weight_byte", {}, "unknown field 'models.Qwen3-235B.weight_byte'", "did you mean 'weight_bytes'?"),
    ("schema", "talaria.profile/2", "schema = 'talaria.profile/2'", "talaria.profile/1"),
    ("models", {}, "models", "at least 1 item"),
    ("fits/Qwen4", {}, "document", "not of 'Qwen4'"),
]


@pytest.mark.parametrize(("path", "value", "what", "allowed"), MISTAKES)
def test_a_wrong_value_is_one_line_with_file_field_and_what_is_allowed(
    document: dict[str, Any], path: str, value: Any, what: str, allowed: str
) -> None:
    _set(document, path, value)
    with pytest.raises(InputError) as caught:
        parse(ProfileFile, document, "mine.json")
    line = str(caught.value)
    assert line.startswith(f"mine.json: {what}")
    assert allowed in line
    assert "\n" not in line


def test_a_missing_field_is_named(document: dict[str, Any]) -> None:
    del document["models"]["GLM5-nvfp4"]["weight_bytes"]
    with pytest.raises(InputError, match=r"mine\.json: missing field 'models\.GLM5-nvfp4\.weight_bytes'"):
        parse(ProfileFile, document, "mine.json")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", ":1: the file is empty"),
        ("{\n bad", ":2: not JSON"),
        ("[1]", "document is not an object; allowed: an object with description, fits, gpu"),
        ("\xff", "cannot read: not UTF-8"),
    ],
)
def test_a_file_that_holds_no_profile_is_one_line(content: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError) as caught:
        load(str(path))
    assert str(caught.value).startswith(f"{path}{line}" if line.startswith(":") else f"{path}: {line}")


def test_a_misspelt_field_is_reported_by_the_name_it_was_given(document: dict[str, Any]) -> None:
    document["hardware"]["hbm_byte"] = document["hardware"].pop("hbm_bytes")
    with pytest.raises(InputError, match=r"unknown field 'hardware\.hbm_byte'.*did you mean 'hbm_bytes'"):
        parse(ProfileFile, document, "mine.json")


def test_a_missing_file_is_one_line() -> None:
    with pytest.raises(InputError, match=r"^nowhere\.json: cannot read: No such file"):
        load("nowhere.json")


def test_an_unknown_profile_or_model_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'paper-tp8'"):
        load("paper-tp88")
    with pytest.raises(InputError, match=r"profile paper-tp8: unknown model 'Qwen3-235'.*did you mean 'Qwen3-235B'"):
        load("paper-tp8").timing("Qwen3-235")
