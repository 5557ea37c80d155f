"""Plain values: what policies, their hosts and logs pass to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(kind: type[T]) -> type[T]:
    """A dataclass with slots, compared and hashed by content, that nobody changes.

    The type checker sees to the last. Frozen at run time too, a value of ten fields would cost five times as much to make, and a
    simulated call makes two dozen.
    """
    return dataclass(slots=True, unsafe_hash=True)(kind)
