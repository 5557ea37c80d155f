"""Memory bookkeeping that the simulator and the real engine share. No bytes are moved here."""
