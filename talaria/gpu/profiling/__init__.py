"""Measures a running cluster through its own endpoint and writes the profile and the scenario that simulate it."""
