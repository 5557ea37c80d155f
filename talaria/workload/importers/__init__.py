"""Importers of public and private traces, one module per format, behind one registry."""
