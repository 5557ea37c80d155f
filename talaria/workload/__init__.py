"""Sessions: one trace format, importers of real traces, generators and arrival processes."""
