"""The mover of CUDA devices, over the driver's virtual memory management. Needs ``cuda-python`` and the current device of this thread."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from talaria.gpu.memory.mover import Copies, CopyFailed, Event, Memory, Stream

_BLOCKING_EVENT: Final = 1
"""CU_EVENT_BLOCKING_SYNC: who waits sleeps; the scheduler's thread needs the core."""
_UNTIMED: Final = 2
"""CU_EVENT_DISABLE_TIMING."""
_NON_BLOCKING_STREAM: Final = 1
_BATCH: Final = 16
"""So many copies or more are worth a batch."""
PIN_STEP: Final = 256 * 2**20
"""Host memory is pinned between multiples of it: a call holds locks of the driver, and with them the work of all its GPUs, a tenth of a
second for each GB, and pins less than 512 GiB, on some kernels less than 2 GiB."""
_POPULATE: Final = 23
"""MADV_POPULATE_WRITE."""
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _driver() -> Any:
    """Raises ImportError where cuda-python is not installed."""
    from cuda.bindings import driver

    return driver


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a driver call returns beside its status. Raises CopyFailed for an error, which may be one of an earlier copy."""
    status, *values = answer
    if int(status):
        raise CopyFailed(f"CUDA says {status!r}")
    return values[0] if len(values) == 1 else values


def cut(copies: Copies) -> Copies:
    """The same, none across a multiple of ``PIN_STEP``: what a copy reads or writes on the host must have been pinned as one."""
    parts: list[Copies] = []
    to, source, nbytes = copies
    while True:
        size = np.minimum(nbytes, PIN_STEP - np.maximum(to % PIN_STEP, source % PIN_STEP))
        parts.append(Copies(to, source, size))
        more = size < nbytes
        if not more.any():
            return Copies(*(np.concatenate(column) for column in zip(*parts, strict=True))) if len(parts) > 1 else copies
        to, source, nbytes = (column[more] for column in (to + size, source + size, nbytes - size))


class CudaEvent:
    def __init__(self, driver: Any, context: Any, stream: Any) -> None:
        self._driver, self._context = driver, context
        self._event = _checked(driver.cuEventCreate(_BLOCKING_EVENT | _UNTIMED))
        _checked(driver.cuEventRecord(self._event, stream))

    def __del__(self) -> None:
        self._driver.cuEventDestroy(self._event)

    def done(self) -> bool:
        status: Any = self._driver.cuEventQuery(self._event)[0]
        return bool(status != self._driver.CUresult.CUDA_ERROR_NOT_READY)

    def wait(self) -> None:
        _checked(self._driver.cuCtxSetCurrent(self._context))  # the caller's thread may be one of ours
        _checked(self._driver.cuEventSynchronize(self._event))

    def hold_compute(self) -> None:
        import torch

        _checked(self._driver.cuStreamWaitEvent(torch.cuda.current_stream().cuda_stream, self._event, 0))


class CudaStream:
    def __init__(self, driver: Any, context: Any) -> None:
        self._driver, self._context = driver, context
        self._stream = _checked(driver.cuStreamCreate(_NON_BLOCKING_STREAM))

    def copy(self, copies: Copies, after: Sequence[Any] = ()) -> Event:
        driver = self._driver
        _checked(driver.cuCtxSetCurrent(self._context))  # the caller's thread may be one of ours
        try:
            for earlier in after:
                _checked(driver.cuStreamWaitEvent(self._stream, earlier.cuda_event, 0))
            self._begin(cut(copies))
            return CudaEvent(driver, self._context, self._stream)
        except CopyFailed:
            driver.cuStreamSynchronize(self._stream)  # what did begin must not be under way when the caller gives the memory to others
            raise

    def _begin(self, copies: Copies) -> None:
        driver = self._driver
        if len(copies.to) < _BATCH or not hasattr(driver, "cuMemcpyBatchAsync"):
            for to, source, nbytes in zip(copies.to.tolist(), copies.source.tolist(), copies.nbytes.tolist(), strict=True):
                _checked(driver.cuMemcpyAsync(to, source, nbytes, self._stream))
        else:
            self._copy_batch(copies)

    def _copy_batch(self, copies: Copies) -> None:
        """One call for all: a page of KV is two pieces a layer, and a call for each takes longer than the bytes."""
        driver = self._driver
        how = driver.CUmemcpyAttributes()
        how.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        to, source = ([driver.CUdeviceptr(address) for address in column.tolist()] for column in (copies.to, copies.source))
        _checked(driver.cuMemcpyBatchAsync(to, source, copies.nbytes.tolist(), len(to), [how], [0], 1, self._stream))

    def close(self) -> None:
        _checked(self._driver.cuStreamSynchronize(self._stream))
        _checked(self._driver.cuStreamDestroy(self._stream))


class CudaMemory:
    """Physical memory of a device."""

    def __init__(self, driver: Any, handle: Any, nbytes: int) -> None:
        self._driver = driver
        self.handle = handle
        self.nbytes = nbytes

    def export(self) -> int:
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(_checked(self._driver.cuMemExportToShareableHandle(self.handle, kind, 0)))

    def close(self) -> None:
        _checked(self._driver.cuMemRelease(self.handle))


class CudaMover:
    """Of the device that is current when it is made. Raises ImportError, CopyFailed."""

    def __init__(self) -> None:
        driver = self._driver = _driver()
        _checked(driver.cuInit(0))
        self._context = _checked(driver.cuCtxGetCurrent())
        self._device = _checked(driver.cuCtxGetDevice())
        where = driver.CUmemLocation()
        where.type, where.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, int(self._device)
        properties = self._properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = where
        properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        access = self._access = driver.CUmemAccessDesc()
        access.location, access.flags = where, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granule_bytes = int(_checked(driver.cuMemGetAllocationGranularity(properties, recommended)))
        self._pinned: dict[int, list[int]] = {}
        """Addresses of the pieces, by that of the first."""

    def reserve(self, nbytes: int, at: int = 0) -> int:
        address = int(_checked(self._driver.cuMemAddressReserve(nbytes, 0, at, 0)))
        if at and address != at:  # the driver takes the wish for a hint
            self.unreserve(address, nbytes)
            raise OSError(f"{nbytes} bytes at {at:#x} are taken")
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        _checked(self._driver.cuMemAddressFree(address, nbytes))

    def create(self, nbytes: int) -> Memory:
        return CudaMemory(self._driver, _checked(self._driver.cuMemCreate(nbytes, self._properties, 0)), nbytes)

    def adopt(self, descriptor: int, nbytes: int) -> Memory:
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        try:
            return CudaMemory(self._driver, _checked(self._driver.cuMemImportFromShareableHandle(descriptor, kind)), nbytes)
        finally:
            os.close(descriptor)

    def map(self, address: int, memories: Sequence[Memory]) -> None:
        """Access is set once for all of them: it takes any range that has no gap."""
        at = address
        for memory in memories:
            assert isinstance(memory, CudaMemory)
            _checked(self._driver.cuMemMap(at, memory.nbytes, 0, memory.handle, 0))
            at += memory.nbytes
        _checked(self._driver.cuMemSetAccess(address, at - address, [self._access], 1))

    def unmap(self, address: int, memories: Sequence[Memory]) -> None:
        """One by one: no call takes a part of what another has mapped, or more."""
        for memory in memories:
            _checked(self._driver.cuMemUnmap(address, memory.nbytes))
            address += memory.nbytes

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        _checked(self._driver.cuMemsetD8Async(address, byte, nbytes, 0))
        _checked(self._driver.cuStreamSynchronize(0))

    def pin(self, address: int, nbytes: int) -> None:
        _checked(self._driver.cuCtxSetCurrent(self._context))  # the caller's thread may be one of ours
        end = address + nbytes
        pieces = [address, *range((address // PIN_STEP + 1) * PIN_STEP, end, PIN_STEP)]
        for number, (first, after) in enumerate(zip(pieces, [*pieces[1:], end], strict=True)):
            _libc.madvise(first, after - first, _POPULATE)  # pages come without the driver's locks; where the kernel cannot, with them
            try:
                _checked(self._driver.cuMemHostRegister(first, after - first, 0))
            except CopyFailed:
                for done in pieces[:number]:
                    self._driver.cuMemHostUnregister(done)
                raise
        self._pinned[address] = pieces

    def unpin(self, address: int) -> None:
        _checked(self._driver.cuCtxSetCurrent(self._context))
        answers = [self._driver.cuMemHostUnregister(piece) for piece in self._pinned.pop(address)]
        for answer in answers:
            _checked(answer)

    def stream(self) -> Stream:
        return CudaStream(self._driver, self._context)
