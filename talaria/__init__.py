"""Talaria: session-aware placement and admission for several large models on shared GPU groups."""

__version__ = "0.1.0"
