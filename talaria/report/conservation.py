"""The sums that every run checks end in one error."""

from __future__ import annotations


class ConservationError(AssertionError):
    """A sum that must hold in every run does not: a bug in the world that ran, never a user's error."""
