"""What a comparison leaves beside the run directories of its configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from talaria.report.document import Document, for_file, to_json
from talaria.report.files import write_atomically
from talaria.report.record import RunRecord


def write(out: Path, document: Document, runs: Mapping[str, Sequence[RunRecord]]) -> None:
    """``compare.json`` and the figures of all configurations together in ``out``."""
    from talaria.report.figures import latency_cdfs, sct_by_configuration, switch_latency
    from talaria.report.style import to_png

    write_atomically(out / "compare.json", to_json(for_file(document)).encode())
    for name, draw in (("compare", sct_by_configuration), ("latency", latency_cdfs), ("switches", switch_latency)):
        write_atomically(out / f"{name}.png", to_png(draw(runs)))
