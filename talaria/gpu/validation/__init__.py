"""How far a simulation was off: the same trace simulated and replayed on engines, metric by metric, session by session, call by call."""
