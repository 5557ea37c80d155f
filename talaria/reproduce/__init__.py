"""The published experiments beside the simulator's answers: targets, the runs that predict them, table, page and figures."""
