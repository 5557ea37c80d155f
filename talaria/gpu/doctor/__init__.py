"""Checks a cluster file against the machine it is to run on, before anything is started."""
