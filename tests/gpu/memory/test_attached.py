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


@pytest.mark.parametrize("scene", [PLACING, STAGING], ids=["placing", "staging"])
def test_it_in_the_engines_interpreter(cpu_engine: config.Engine, scene: str) -> None:
    assert cpu_engine.python is not None
    variables = {**os.environ, **cpu_engine.environment}
    done = subprocess.run([cpu_engine.python, "-c", scene], env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
