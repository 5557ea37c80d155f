"""YAML files that users bring: one mapping per file, read so that a mistake in the file stays one line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from talaria.errors import InputError


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, in which a key given twice is a mistake: YAML itself would drop the first value silently."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, fields: Iterable[str]) -> dict[str, Any]:
    """The mapping in the YAML (or JSON) file at ``path``; ``fields`` are the keys to name when there is none.

    Raises InputError with file and line if the file cannot be read, is no YAML, repeats a key or holds something else.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path), fix="give a readable YAML file") from None
    except UnicodeDecodeError as error:
        what = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise InputError(what, where=str(path), allowed="YAML or JSON in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(f"is no YAML: {getattr(error, 'problem', None) or error}", where=where, allowed="YAML or JSON") from None
    except RecursionError:
        raise InputError("is nested too deeply", where=str(path), allowed="YAML or JSON") from None
    if not isinstance(document, dict):
        found = "empty" if document is None else f"a {type(document).__name__}"
        raise InputError(f"is {found}", where=str(path), allowed=f"a mapping with {', '.join(fields)}")
    for key in document:
        if not isinstance(key, str):
            raise InputError(f"{key!r} is no name", where=str(path), allowed=", ".join(fields))
    return document
