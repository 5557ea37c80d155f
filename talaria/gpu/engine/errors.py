"""What can go wrong with an engine, as far as its users treat it differently."""

from __future__ import annotations


class EngineFailed(Exception):
    """The engine did not start, or had to be killed. ``str(error)`` says why and names its log; it is safe to start it again."""

    def __init__(self, why: str, model: str = "") -> None:
        super().__init__(why)
        self.model = model
        """Whose start did not succeed, if it was that."""


class Busy(Exception):
    """The engine still runs calls, so nothing was released: it goes on serving."""


class SwitchFailed(EngineFailed):
    """The switch did not happen. The states of both engines say what can still be used."""
