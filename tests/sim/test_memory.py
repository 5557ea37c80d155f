"""The memory of a simulated instance: what happens does not depend on who looks, or when."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from talaria.profiles import load
from talaria.sim.memory import InstanceMemory
from talaria.substrate.prefix import PrefixForest

PROFILE = load("paper-tp8")
MODELS = tuple(PROFILE.models)


def staging_memory() -> InstanceMemory:
    """The first model is active, the second is being staged since time 0."""
    memory = InstanceMemory(PROFILE, MODELS, PrefixForest(), hkvr=True, swap=True)
    for name in MODELS:
        memory.open(name)
    memory.activate(MODELS[0], 0.0)
    memory.stage(MODELS[1], 1.0, 0.0)
    return memory


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.0, 3.0), max_size=20), st.floats(3.0, 4.0))
def test_staging_comes_as_far_however_often_somebody_looks(looks: list[float], end_s: float) -> None:
    watched, unwatched = staging_memory(), staging_memory()
    for look_s in sorted(looks):
        watched.staged(look_s)
    assert watched.staged(end_s) == unwatched.staged(end_s)


def test_staging_advances_with_the_clock_up_to_the_whole_model() -> None:
    memory = staging_memory()
    shares = [memory.staged(time_s)[1] for time_s in (0.0, 0.5, 1.0, 1000.0)]
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[2] > 0.0 and shares[-1] == 1.0
