"""Tuning and sweeps: Optuna studies over the knobs, in any of Optuna's storages. Above the simulator, below the command line."""
