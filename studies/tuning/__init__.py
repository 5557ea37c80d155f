"""What tuning says about the shipped scenarios and two real traces: ``python -m studies.tuning`` rebuilds ``results/``."""
