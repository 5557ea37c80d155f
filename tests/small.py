"""A scenario that takes a few milliseconds a replay."""

SCENARIO = """\
schema: talaria.scenario/1
name: small
about: "Two sessions on one server."
profile: paper-tp8
models: [Qwen3-235B, GLM5-nvfp4, Qwen3.5-122B-A10B]
instances: [{count: 1, pool: cold, max_resident_models: 3}]
workload: {preset: quickstart, first_sessions: 2}
gap_cap_s: 10
"""
