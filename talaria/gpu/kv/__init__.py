"""What an engine has in its prefix cache, as its own events tell."""
