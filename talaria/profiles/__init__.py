"""Hardware profiles: how long the work of a model takes on one kind of instance, and where each number comes from.

``load(name_or_path)`` gives a ``Profile``; its ``hardware`` and ``models`` hold plain numbers and ``timing(model)`` the
latency shape that policies and the simulator share.
"""

from talaria.profiles.load import load, names
from talaria.profiles.numbers import HardwareNumbers, ModelNumbers
from talaria.profiles.profile import Profile

__all__ = ["HardwareNumbers", "ModelNumbers", "Profile", "load", "names"]
