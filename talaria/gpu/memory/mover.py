"""What moves bytes: one interface, implemented for CPUs (``cpu``) and for CUDA devices (``cuda``).

Addresses are plain integers of this process. Physical memory is apart from addresses: a range is reserved once and for all, and memory is
mapped into it and unmapped, so that whatever points there stays valid while its memory is elsewhere (SPEC §5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.int64]


class CopyFailed(RuntimeError):
    """A copy did not take place, or not wholly."""


class Copies(NamedTuple):
    """Any number of copies, as arrays of the same length: where to, where from, and how much, in bytes."""

    to: Addresses
    source: Addresses
    nbytes: Addresses


class Event(Protocol):
    """The end of some copies."""

    def done(self) -> bool:
        """Whether they have ended, well or not."""

    def wait(self) -> None:
        """Block until they have ended. Raises CopyFailed."""

    def hold_compute(self) -> None:
        """What the device computes from here on waits for them; on a CPU the caller does. Raises CopyFailed where it is known already."""


class Stream(Protocol):
    """Copies beside whatever else the process does, call after call; those of one call in any order, so they must not overlap."""

    def copy(self, copies: Copies, after: Sequence[Any] = ()) -> Event:
        """Begin, behind what was begun before and behind ``after``, events of PyTorch.

        Raises CopyFailed where it cannot; then nothing of it is under way.
        """

    def close(self) -> None:
        """End when everything begun has ended."""


class Memory(Protocol):
    """Physical memory that can be mapped, here and in other processes."""

    nbytes: int

    def export(self) -> int:
        """A new file descriptor that stands for it in another process."""

    def close(self) -> None:
        """Let go of it; what is mapped stays."""


class Mover(Protocol):
    """Device memory of one rank, and its copies. Sizes and addresses of mappings are multiples of ``granule_bytes``."""

    granule_bytes: int

    def reserve(self, nbytes: int, at: int = 0) -> int:
        """An address range with nothing behind it; at ``at`` where given. Raises OSError if it cannot be had."""

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a range up, with nothing mapped into it."""

    def create(self, nbytes: int) -> Memory: ...

    def adopt(self, descriptor: int, nbytes: int) -> Memory:
        """What another process exported; takes the descriptor over."""

    def map(self, address: int, memories: Sequence[Memory]) -> None:
        """One after the other, each as a whole: CUDA maps no parts."""

    def unmap(self, address: int, memories: Sequence[Memory]) -> None:
        """What was mapped there. Reads and writes are fatal until something is mapped again."""

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Mapped memory, before this returns."""

    def pin(self, address: int, nbytes: int) -> None:
        """Make host memory of this process known to the device, so that copies run beside everything else."""

    def unpin(self, address: int) -> None: ...

    def stream(self) -> Stream: ...
