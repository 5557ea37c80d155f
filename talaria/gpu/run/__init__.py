"""Replays a trace against a running gateway, like a client, and writes what the simulator writes."""
