"""Policy values as JSON values and back, exactly: what a decision log needs to replay a decision.

Scalars stand for themselves and a tuple is an array. Everything else is an object with one key, the name of its type:
``{"Call": {"id": 1, ...}}``, ``{"LineKey": ["t", "s", "m", "l"]}``, ``{"Tier": "device"}``, ``{"map": [[key, value], ...]}`` in the
mapping's own order, ``{"list": [...]}``, ``{"set": [...]}`` and ``{"frozenset": [...]}`` sorted, and ``{"float": "inf"}`` for what
JSON cannot write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from talaria.policy import books, calls, cost, explain, instance, knobs, leases, overload, sessions, snapshot, timing

Json = Any
"""None, bool, int, float (finite), str, list of Json or dict of Json, as ``json.loads`` gives them."""


class CodecError(ValueError):
    """A value or document that the codec does not know; the text says which type and what was expected."""


class Codec:
    """Encodes and decodes values made of the given dataclasses, named tuples and enums, and of plain containers.

    ``decode(encode(value)) == value`` with equal types throughout; equal values have equal encodings. Raises CodecError
    on a type outside the registry (a live object or a numpy array in a policy's interface is a mistake worth a loud error).
    """

    def __init__(self, types: Iterable[type]) -> None:
        self._encoders: dict[type, Callable[[Any], Json]] = {kind: _same for kind in (type(None), bool, int, str)}
        self._encoders |= {
            float: _encode_float,
            tuple: self._encode_items,
            list: lambda value: {"list": self._encode_items(value)},
            dict: self._encode_mapping,
            set: lambda value: {"set": self._encode_sorted(value)},
            frozenset: lambda value: {"frozenset": self._encode_sorted(value)},
        }
        self._decoders: dict[str, Callable[[Json], Any]] = {
            "float": float,
            "list": self._decode_items,
            "map": lambda pairs: {self.decode(key): self.decode(value) for key, value in pairs},
            "set": lambda items: set(self._decode_items(items)),
            "frozenset": lambda items: frozenset(self._decode_items(items)),
        }
        for kind in types:
            self._register(kind)

    def encode(self, value: Any) -> Json:
        """``value`` as a JSON value."""
        encoder = self._encoders.get(type(value))
        if encoder is None:
            encoder = self._encoder_of_relative(value)
        return encoder(value)

    def decode(self, document: Json) -> Any:
        """The value that ``encode`` wrote."""
        if isinstance(document, list):
            return tuple(self._decode_items(document))
        if not isinstance(document, dict):
            return document
        if len(document) != 1:
            raise CodecError(f"an object must have exactly one key, the type; found {sorted(document)[:5]}")
        ((name, content),) = document.items()
        decoder = self._decoders.get(name)
        if decoder is None:
            raise CodecError(f"unknown type {name!r}; known: {', '.join(sorted(self._decoders))}")
        try:
            return decoder(content)
        except CodecError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise CodecError(f"{name} does not fit its content: {error}") from None

    def _register(self, kind: type) -> None:
        name = kind.__name__
        if name in self._decoders:
            raise CodecError(f"two types are named {name!r}")
        if issubclass(kind, Enum):
            self._encoders[kind] = lambda value: {name: value.value}
            self._decoders[name] = kind
        elif is_dataclass(kind):
            names = tuple(field.name for field in fields(kind))
            self._encoders[kind] = lambda value: {name: {key: self.encode(getattr(value, key)) for key in names}}
            self._decoders[name] = lambda content: kind(**{key: self.decode(item) for key, item in content.items()})
        elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
            self._encoders[kind] = lambda value: {name: self._encode_items(value)}
            self._decoders[name] = lambda content: kind(*self._decode_items(content))
        else:
            raise CodecError(f"{name} is no dataclass, named tuple or enum")

    def _encoder_of_relative(self, value: Any) -> Callable[[Any], Json]:
        """For what is not registered itself: numpy's float is a float, any mapping is a map."""
        if isinstance(value, float):
            return _encode_float
        if isinstance(value, Mapping):
            return self._encode_mapping
        raise CodecError(f"cannot encode a {type(value).__module__}.{type(value).__qualname__}: {value!r:.80}")

    def _encode_items(self, items: Iterable[Any]) -> list[Json]:
        return [self.encode(item) for item in items]

    def _encode_mapping(self, value: Mapping[Any, Any]) -> Json:
        return {"map": [[self.encode(key), self.encode(item)] for key, item in value.items()]}

    def _encode_sorted(self, items: Iterable[Any]) -> list[Json]:
        return sorted(self._encode_items(items), key=repr)

    def _decode_items(self, items: Json) -> list[Any]:
        return [self.decode(item) for item in items]


def value_types(*modules: ModuleType) -> list[type]:
    """The dataclasses, named tuples and enums that the modules define themselves, in order of definition."""
    found = [item for module in modules for item in vars(module).values() if isinstance(item, type) and item.__module__ == module.__name__]
    return [kind for kind in found if issubclass(kind, (Enum, tuple)) or is_dataclass(kind)]


def _same(value: Any) -> Json:
    return value


def _encode_float(value: float) -> Json:
    number = float(value)
    return number if math.isfinite(number) else {"float": repr(number)}


CODEC = Codec(value_types(calls, timing, snapshot, instance, knobs, sessions, leases, cost, explain, overload, books))
"""Everything that crosses the faces of the router and the slot scheduler."""
