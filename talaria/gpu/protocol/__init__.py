"""What processes say to each other: gateway and agents (``agent``), agents and the engines' front ends (``engine``)."""
