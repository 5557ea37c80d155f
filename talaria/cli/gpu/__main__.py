"""``python -m talaria.cli.gpu``: the console program, for processes that start it."""

from talaria.cli.gpu import main

main()
