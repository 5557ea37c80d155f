"""This rank's part of the arena: its window, where its weights and its KV lie for good, and what a switch does behind it (SPEC §5.1, §5.4).

The platform (``hooks.platform``) calls ``attach`` when the model is loaded and ``carve`` when its KV pool is made; runtime buffers come
from the other end; from then on nothing moves. Around SGLang's release the window is hidden, around its resume it is shown again, with
the weights from what was staged and from their host image, with KV that is all zeros, and with runtime buffers as they were.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

from talaria.gpu import compat, seams
from talaria.gpu.hooks import placing
from talaria.gpu.hooks.runtime import Runtime
from talaria.gpu.memory import gather
from talaria.gpu.memory.arena import Arena
from talaria.gpu.memory.cpu import MemoryFile, unmap
from talaria.gpu.memory.gather import NOTHING, Image, Ledger
from talaria.gpu.memory.mover import CopyFailed, Mover
from talaria.gpu.memory.stager import KvRegion
from talaria.gpu.memory.tenant import Tenant
from talaria.gpu.protocol import arena as protocol
from talaria.gpu.protocol.engine import MODEL_VARIABLE

_log = logging.getLogger(__name__)
_POISON: Final = 0xFF
"""Makes a number that is none of every float."""


class Stages(Protocol):
    """Who stages another model's weights in this one's KV while it serves."""

    def stage(self, model: str, image: Image, bytes_per_s: float) -> None:
        """From now on, in place of whatever was staged before. From any thread."""

    def unstage(self) -> None: ...

    def park(self) -> Ledger:
        """Stop; nothing is written from here on."""

    def serve(self) -> None:
        """The model is active again, and its KV empty."""


class Attached:
    """One rank's window over its arena. The scheduler's thread calls everything but ``_stage``."""

    def __init__(self, tenant: Tenant, mover: Mover, model: Any, device: torch.device) -> None:
        """Raises ValueError where the model does not fit."""
        self.tenant, self.mover, self.device = tenant, mover, device
        welcome = tenant.welcome
        self.arena = Arena(mover, welcome.chunks, welcome.chunk_bytes, tenant.chunks)
        if not welcome.made:
            tenant.made(self.arena.export())
        self.window = self.arena.window()
        self.stream = mover.stream()
        self.runtime = Runtime(mover, self.window.address + self.window.nbytes, device)
        self.kv: KvRegion | None = None
        """Set when the KV pool is made; stays None for a kind of pool that ``hooks.pools`` does not know."""
        self.kv_buffers: Callable[[], list[torch.Tensor]] = list
        """Of SGLang's pool, in the order in which they were carved."""
        self.staging: Stages | None = None
        self._images: dict[str, tuple[int, Image]] = {}
        """By model: its memory file, and where that is mapped."""
        self._kv_bytes: list[tuple[int, int, int]] = []
        """Address, bytes and bytes of a page of each fragment."""
        tenant.take()
        self.arena.show(self.window, range(self.arena.count))
        mover.fill(self.window.address, self.window.nbytes, 0)  # what others left between tensors is no part of an image
        self.nbytes = placing.move(model, self.window.address, self.window.nbytes, device)
        self._model = model
        self._addresses: dict[str, int] = {}
        """Of what lies in the window when the model is parked for the first time: SGLang makes some buffers anew in its warm-up."""
        self._chunks_used = -(-self.nbytes // self.arena.chunk_bytes)
        self.image: Image | None = None
        """Set once SGLang has done with the weights what it does after a load."""

    def keep(self) -> None:
        """The weights as they lie in the window, on the host from now on; in the memory of an earlier image if that had as many bytes.

        And room for runtime buffers there. Raises OSError, CopyFailed.
        """
        placing.synchronize(self.device)
        tenant, nbytes = self.tenant, self.nbytes
        earlier = tenant.image if tenant.welcome.image_bytes == nbytes else None
        memory = MemoryFile.make("talaria-weights", nbytes) if earlier is None else MemoryFile(earlier, nbytes)
        image = Image(memory.map(0, nbytes), nbytes)
        self.mover.pin(image.address, nbytes)
        self.stream.copy(gather.copies([(image.address, self.window.address, nbytes)])).wait()
        if earlier is None:
            tenant.keep(memory.descriptor, nbytes)
            if tenant.image is not None:
                os.close(tenant.image)
        memory.close()
        self.image = image
        self.runtime.keep()

    # --- the KV pool -------------------------------------------------------------------------------------------------

    def carve(self, count: int, nbytes: int, page_bytes: int) -> list[int]:
        """Addresses of ``count`` fragments of KV, all of ``nbytes``, behind the weights.

        Each takes whole chunks and ends where its last chunk does; it has more pages than were asked for where there is room for them.
        Raises ValueError where they do not fit.
        """
        if self._kv_bytes:
            raise ValueError("an arena knows one KV pool")
        size = self.arena.chunk_bytes
        chunks, first = -(-nbytes // size), self._chunks_used
        if count * chunks * size > self.room_bytes:
            needed, there = (first + count * chunks) * size / 2**20, (first * size + self.room_bytes) / 2**20
            beside = f"{there:.1f} MiB beside {self.runtime.nbytes / 2**20:.1f} MiB of runtime buffers"
            raise ValueError(f"weights and KV of {needed:.1f} MiB do not fit into {beside}: fewer kv_tokens, or more managed_gib")
        self._chunks_used += count * chunks
        self.kv = KvRegion(first, count, chunks, page_bytes)
        rest = chunks * size % page_bytes
        addresses = [self.window.address + (first + number * chunks) * size + rest for number in range(count)]
        self._kv_bytes = [(address, chunks * size - rest, page_bytes) for address in addresses]
        self._refresh_kv()
        return addresses

    @property
    def room_bytes(self) -> int:
        """Between what grows from the low end and what grows from the high end, in whole chunks."""
        size = self.arena.chunk_bytes
        return (self.runtime.low - self._floor) // size * size

    @property
    def _floor(self) -> int:
        """The address behind weights and KV."""
        return self.window.address + self._chunks_used * self.arena.chunk_bytes

    def described(self) -> str:
        """Who has how much of the arena."""
        kv_bytes, mib = self._floor - self.window.address - self.nbytes, 2**20
        parts = f"{self.nbytes / mib:.1f} MiB of weights, {kv_bytes / mib:.1f} of KV, {self.runtime.nbytes / mib:.1f} of runtime buffers"
        return f"{parts} in an arena of {self.window.nbytes / mib:.1f} MiB"

    def runtime_buffers(self) -> AbstractContextManager[Any]:
        """While entered, what SGLang makes on the device are runtime buffers. Raises SystemExit with one line where they do not fit."""
        return self.runtime.within(self._floor)

    @property
    def empty(self) -> int:
        """The byte that free KV is made of."""
        return _POISON if self.tenant.welcome.check else 0

    def _refresh_kv(self) -> None:
        """KV as in a new pool; where switches are checked, only SGLang's padding page is."""
        for address, nbytes, page_bytes in self._kv_bytes:
            self.mover.fill(address, nbytes, self.empty)
            if self.tenant.welcome.check:
                self.mover.fill(address, page_bytes, 0)

    # --- switches ----------------------------------------------------------------------------------------------------

    def teardown(self, begun_s: float) -> None:
        """Let go of the arena. Raises OSError, CopyFailed."""
        ledger = self.staging.park() if self.staging is not None else NOTHING
        placing.synchronize(self.device)
        self._addresses = self._addresses or self._in_window()
        self.runtime.park(self.stream)
        self.arena.hide(self.window)
        self.tenant.park(ledger, time.monotonic() - begun_s)

    def gather(self) -> tuple[gather.Gathered, Ledger]:
        """Take the arena and bring the weights behind the window. Raises OSError, CopyFailed, RuntimeError."""
        assert self.image is not None
        ledger = self.tenant.take()
        gathered = gather.gather(self.arena, self.window, self.image, ledger.staged, self.stream, show=True)
        gathered.event.wait()
        now = self._in_window()
        moved = [name for name, address in self._addresses.items() if now.get(name) != address]
        if moved or [rows.data_ptr() for rows in self.kv_buffers()] != [address for address, _, _ in self._kv_bytes]:
            raise RuntimeError(f"what was captured has moved: {moved[0] if moved else 'KV'}")
        if self.tenant.welcome.check:
            self._compare(self.image)
        return gathered, ledger

    def _in_window(self) -> dict[str, int]:
        first, end = self.window.address, self.window.address + self.nbytes
        return {name: address for name, address in placing.addresses(self._model).items() if first <= address < end}

    def _compare(self, image: Image) -> None:
        """Raises RuntimeError where the weights are not what was captured."""
        step = 64 * 2**20
        for at in range(0, self.nbytes, step):
            shape = (min(step, self.nbytes - at),)
            here = placing.tensor_at(self.window.address + at, shape, torch.uint8, self.device)
            there = placing.tensor_at(image.address + at, shape, torch.uint8, torch.device("cpu"))
            if not torch.equal(here.cpu(), there):
                raise RuntimeError(f"weights differ from their image in [{at}, {at + shape[0]}) after a switch")

    def serve(self) -> None:
        """KV is as empty as SGLang takes it to be, and runtime buffers are as they were. Raises CopyFailed."""
        if self.tenant.welcome.check and self.runtime.nbytes:
            self.mover.fill(self.runtime.low, self.runtime.nbytes, self.empty)
        self.runtime.resume(self.stream)
        self._refresh_kv()
        if self.staging is not None:
            self.staging.serve()

    # --- staging -----------------------------------------------------------------------------------------------------

    def stage(self, message: protocol.Stage, descriptor: int | None) -> None:
        """What the agent wants to be staged; on a thread of its own. What cannot be is not, and the engine goes on."""
        if (staging := self.staging) is None:
            return
        if descriptor is None:
            staging.unstage()
            return
        try:
            staging.stage(message.model, self._image_of(staging, message.model, message.nbytes, descriptor), message.bytes_per_s)
        except (OSError, ValueError, CopyFailed) as error:
            _log.error("talaria: %s cannot be staged: %s", message.model, error)
            staging.unstage()

    def _image_of(self, staging: Stages, model: str, nbytes: int, descriptor: int) -> Image:
        """Mapped and pinned once; anew where the model has come to have another image. Raises OSError, CopyFailed."""
        file = os.fstat(descriptor).st_ino
        if model in self._images:
            known, image = self._images[model]
            if known == file:
                return image
            staging.unstage()  # nothing reads it any more
            del self._images[model]
            self.mover.unpin(image.address)
            unmap(image.address, image.nbytes)
        image = Image(MemoryFile(descriptor, nbytes).map(0, nbytes), nbytes)
        try:
            self.mover.pin(image.address, nbytes)
        except CopyFailed:
            unmap(image.address, nbytes)
            raise
        self._images[model] = file, image
        return image


def mover(device: str) -> Mover:
    """Raises ImportError or CopyFailed where the device cannot be used."""
    if device == "cpu":
        from talaria.gpu.memory.cpu import CpuMover

        return CpuMover()
    from talaria.gpu.memory.cuda import CudaMover

    return CudaMover()


attached: Attached | None = None
"""This process's, once its model is loaded."""


def attach(model: Any, device: torch.device) -> None:
    """The model is loaded. Raises SystemExit with one line where it cannot live in the arena."""
    global attached
    if attached is not None:
        raise SystemExit("talaria: an arena knows one model a process, without a draft")
    rank, ranks = compat.tp_rank()
    message = protocol.Attach(os.getpid(), rank, ranks, os.environ.get(MODEL_VARIABLE, ""))
    try:
        tenant = Tenant(os.environ[protocol.SOCKET_VARIABLE], message, _stage)
        attached = Attached(tenant, mover(device.type), model, device)
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"talaria: the model cannot be attached to the arena: {error}") from error


def _stage(message: protocol.Stage, descriptor: int | None) -> None:
    try:
        if attached is not None:
            attached.stage(message, descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


# --- SGLang's switch ---------------------------------------------------------------------------------------------------


class _Clock:
    """The parts of the switch that is under way."""

    def __init__(self) -> None:
        self.begun_s = 0.0
        self.ends_s: list[float] = []
        self.moved: tuple[gather.Gathered, Ledger] | None = None

    def end(self) -> None:
        self.ends_s.append(time.monotonic())


_clock = _Clock()


def _pause(_scheduler: Any, _request: Any) -> None:
    _clock.begun_s = time.monotonic()


def _release(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    answer = original(manager, recv_req)
    if attached is not None:
        attached.teardown(_clock.begun_s)
    return answer


def _resume(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """SGLang brings one kind of memory back after the other (``engine.guard.TAGS``)."""
    if attached is None:
        return original(manager, recv_req)
    if compat.WEIGHTS in recv_req.tags:
        _clock.ends_s = [time.monotonic()]
        _clock.moved = attached.gather()
    if compat.KV_CACHE in recv_req.tags:
        attached.serve()
    answer = original(manager, recv_req)
    _clock.end()
    return answer


def _go_on(_result: Any, *_arguments: Any, **_named: Any) -> None:
    if attached is None or _clock.moved is None:
        return
    _clock.end()
    (gathered, ledger), _clock.moved = _clock.moved, None
    begun_s, weights_s, kv_s, graphs_s, published_s = _clock.ends_s
    attached.tenant.tell(
        protocol.Timed(
            (weights_s - begun_s, kv_s - weights_s, graphs_s - kv_s, published_s - graphs_s), gathered.path, gathered.d2d_bytes,
            gathered.h2d_bytes, ledger.dirty_bytes,
        )
    )  # fmt: skip


def _kv_room(original: Callable[..., int], configurator: Any, *arguments: Any, **named: Any) -> int:
    """Bytes for KV are those of the arena, however little the device has beside it."""
    return original(configurator, *arguments, **named) if attached is None else attached.room_bytes


def _own_memory(_result: None, runner: Any) -> None:
    """The weights load outside SGLang's memory saver: it would keep their first place, and have it filled again at every resume."""
    runner.memory_saver_adapter = compat.no_memory_saver()


def _runtime(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if attached is None:
        return original(*arguments, **named)
    with attached.runtime_buffers():
        return original(*arguments, **named)


def _made(_result: None, scheduler: Any, *_arguments: Any, **_named: Any) -> None:
    if attached is None:
        raise SystemExit("talaria: SGLang knows no platform of ours: is the installed talaria older than its sources?")
    if attached.kv is None:
        pool = type(scheduler.token_to_kv_pool_allocator.get_kvcache()).__name__
        raise SystemExit(f"talaria: KV pools like {pool} have no place in an arena")
    try:
        attached.keep()
    except (OSError, CopyFailed) as error:
        raise SystemExit(f"talaria: the weights cannot be kept on the host: {error}") from error
    _log.info("talaria: %s", attached.described())


HOOKS: Final = (
    compat.Hook(seams.MEMORY_SAVER, "after", _own_memory),
    compat.Hook(seams.KV_ROOM, "around", _kv_room),
    compat.Hook(seams.REQUEST_TABLE, "around", _runtime),
    compat.Hook(seams.ATTENTION, "around", _runtime),
    compat.Hook(seams.SCHEDULER_MADE, "after", _made),
    compat.Hook(seams.PAUSE, "before", _pause),
    compat.Hook(seams.RELEASE, "around", _release),
    compat.Hook(seams.RESUME, "around", _resume),
    compat.Hook(seams.CONTINUE, "after", _go_on),
)
