"""From the record of a run to metrics, intervals, tables, figures, timelines and pages; the same for both worlds."""
