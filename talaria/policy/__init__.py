"""Decisions, written once: pure functions and state machines over plain values. Time is an argument."""
