"""The second world: real SGLang engines under the same policies. Gateway, instance agents, engine plugin; ``talaria-gpu``."""
