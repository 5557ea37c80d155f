"""What policies and bookkeeping may import at all. import-linter holds the direction of the layers; this holds purity, by an allowlist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import talaria

PACKAGE = Path(talaria.__file__).parent
PURE = (
    "__future__", "abc", "array", "bisect", "collections", "collections.abc", "dataclasses", "difflib", "enum", "functools", "hashlib",
    "heapq", "itertools", "math", "operator", "sys", "types", "typing", "numpy", "numpy.typing",
)  # fmt: skip


def imported_modules(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


@pytest.mark.parametrize("layer", ["policy", "substrate"])
def test_a_pure_layer_imports_only_itself_numpy_and_the_deterministic_standard_library(layer: str) -> None:
    own = f"talaria.{layer}"
    files = sorted((PACKAGE / layer).rglob("*.py"))
    foreign = {
        f"{path.relative_to(PACKAGE)}: {module}"
        for path in files
        for module in imported_modules(path.read_text())
        if module not in PURE and module != own and not module.startswith(own + ".")
    }
    assert files and not foreign


@pytest.mark.parametrize("layer", ["policy", "substrate"])
def test_a_pure_layer_draws_no_random_numbers_from_numpy(layer: str) -> None:
    users = [path.name for path in sorted((PACKAGE / layer).rglob("*.py")) if "np.random" in path.read_text()]
    assert users == []


@pytest.mark.parametrize("layer", ["policy", "substrate"])
def test_a_pure_layer_asks_sys_only_for_constants_of_the_platform(layer: str) -> None:
    trees = [ast.parse(path.read_text()) for path in sorted((PACKAGE / layer).rglob("*.py"))]
    attributes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "sys"}
    assert used <= {"byteorder", "float_info", "maxsize"}
