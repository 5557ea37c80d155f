"""A rank's part of the arena without an engine around it: what is moved there, and what comes of wishes that cannot be met."""

from __future__ import annotations

import os
import subprocess

import pytest

from talaria.gpu import config

PLACING = """
import ctypes, torch
from talaria.gpu.hooks import placing

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(8, 4)
        self.register_buffer("angles", torch.arange(6.0))
        self.latent = torch.arange(12.0).reshape(3, 4).contiguous().transpose(0, 1)
        self.half = self.projection.weight.detach()[2:]

model = Model()
before = [model.projection.weight.clone(), model.angles.clone(), model.latent.clone(), model.half.clone()]
room = ctypes.create_string_buffer(8192)
first = ctypes.addressof(room)
nbytes = placing.move(model, first, 8192, torch.device("cpu"))
after = [model.projection.weight, model.angles, model.latent, model.half]
assert nbytes == 4 * 512, nbytes
assert all(first <= tensor.data_ptr() < first + nbytes for tensor in after)
assert all(torch.equal(*pair) for pair in zip(before, after))
assert model.half.data_ptr() == model.projection.weight[2:].data_ptr() and model.latent.stride() == (1, 4)
assert set(placing.addresses(model)) == {"projection.weight", "projection.bias", "angles"}
try:
    placing.move(model, first, 3 * 512, torch.device("cpu"))
    raise AssertionError("it fits")
except ValueError as error:
    assert "weights of 0.0 MiB do not fit" in str(error) and "managed_gib" in str(error)
"""

STAGING = """
import os
from talaria.gpu.hooks import arena
from talaria.gpu.memory.cpu import CpuMover, MemoryFile
from talaria.gpu.memory.mover import CopyFailed
from talaria.gpu.protocol.arena import Stage
from tests.gpu.memory.leaks import descriptors, mappings

class Mover(CpuMover):
    fails = False

    def pin(self, address, nbytes):
        if self.fails:
            raise CopyFailed("no pinned memory")

class Stages:
    said = []

    def stage(self, model, image, bytes_per_s):
        assert bytes_per_s > 0
        self.said.append((model, image))

    def unstage(self):
        self.said.append(None)

attached = arena.attached = arena.Attached.__new__(arena.Attached)
attached.mover, attached.staging, attached._images = Mover(), Stages(), {}
files = [MemoryFile.make("talaria-weights", 64) for _ in range(2)]
before = descriptors(), mappings()
wish = Stage("b", 64, 1.0)
arena._stage(wish, files[0].export())
arena._stage(wish, files[0].export())
assert Stages.said[0] == Stages.said[1] and mappings() == before[1] + 1, "mapped once"
arena._stage(wish, files[1].export())
assert Stages.said[2] is None and Stages.said[3][0] == "b" and mappings() == before[1] + 1, "another image, as large"
Mover.fails = True
arena._stage(Stage("c", 64, 1.0), files[0].export())
assert Stages.said[4:] == [None] and mappings() == before[1] + 1
arena._stage(Stage("", 0, 0.0), None)
arena.attached = None
arena._stage(wish, files[0].export())
assert Stages.said[5:] == [None] and descriptors() == before[0]
"""

RUNTIME = """
import torch
from talaria.gpu import compat
from talaria.gpu.hooks import arena
from talaria.gpu.hooks.runtime import Runtime
from talaria.gpu.memory.arena import Arena
from talaria.gpu.memory.cpu import CpuMover
from tests.gpu.memory.leaks import descriptors

mover = CpuMover()
chunks = Arena(mover, 2, mover.granule_bytes)
window = chunks.window()
chunks.show(window, (0, 1))
floor, end = window.address + mover.granule_bytes, window.address + window.nbytes
runtime, stream = Runtime(mover, end, torch.device("cpu")), mover.stream()
runtime.keep()
runtime.park(stream)
runtime.resume(stream)
assert runtime.nbytes == 0, "nothing to keep"
with runtime.within(floor):
    made = [
        torch.zeros((3, 4), dtype=torch.int32, device="cpu"), torch.ones(5, device="cpu"), torch.full((2,), True, device="cpu"),
        torch.full(size=(2,), fill_value=1.5, device="cpu"), torch.arange(3, 9, 2, device="cpu"), torch.empty(4, 4, device="cpu"),
    ]
    others = [torch.zeros(2), torch.zeros(2, device="meta"), torch.ones(2, device="cpu", requires_grad=True), made[1] + 1]
plain = [
    torch.zeros((3, 4), dtype=torch.int32), torch.ones(5), torch.full((2,), True), torch.full((2,), 1.5), torch.arange(3, 9, 2)
]
assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(made, plain))
assert [end - tensor.data_ptr() for tensor in made] == [512 * number for number in range(1, 7)] and runtime.nbytes == 6 * 512
assert not any(floor <= tensor.data_ptr() < end for tensor in others)

made[-1].copy_(torch.arange(16.0).reshape(4, 4))
runtime.keep()
before = descriptors()
for order in ((1, 0), (0, 1)):
    runtime.park(stream)
    chunks.hide(window)
    chunks.show(window, order)
    mover.fill(window.address, window.nbytes, 0xFF)
    runtime.resume(stream)
    assert all(torch.equal(*pair) for pair in zip(made, [*plain, torch.arange(16.0).reshape(4, 4)]))
assert descriptors() == before
try:
    with runtime.within(floor):
        torch.empty(mover.granule_bytes - 6 * 512 + 1, dtype=torch.uint8, device="cpu")
    raise AssertionError("it fits")
except SystemExit as error:
    assert "runtime buffers of 0.0 MiB do not fit" in str(error) and "managed_gib" in str(error)
assert torch.empty(1 << 20, device="cpu").numel() == 1 << 20, "and ordinary memory again"

class Runner:
    memory_saver_adapter = None

arena._own_memory(None, Runner)
assert not Runner.memory_saver_adapter.enabled
with Runner.memory_saver_adapter.region("weights", enable_cpu_backup=False):
    pass
"""


@pytest.mark.parametrize("scene", [PLACING, RUNTIME, STAGING], ids=["placing", "runtime", "staging"])
def test_it_in_the_engines_interpreter(cpu_engine: config.Engine, scene: str) -> None:
    assert cpu_engine.python is not None
    variables = {**os.environ, **cpu_engine.environment}
    done = subprocess.run([cpu_engine.python, "-c", scene], env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
