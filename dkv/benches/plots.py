"""Pictures of what was measured. They need matplotlib, which the extra ``plot`` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARKERS = {"floor": ("x", "0.45"), "dkv": ("o", "C0"), "peer": ("s", "C1")}
LABELS = {"floor": "floors", "dkv": "DKV", "peer": "peers"}
SMALLEST_KL = 1e-7  # float32 rounding; a log axis has no room for less


def fidelity(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw the rows of :func:`dkv.benches.fidelity.run`: KL against ratio, one panel for each kind of continuation.

    What stores nothing has no ratio and is drawn as a line across.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    for panel, (metric, title) in enumerate((("std_kl", "next tokens"), ("copy_kl", "copied from far back"))):
        axes = figure.add_subplot(1, 2, panel + 1)
        axes.set(title=title, xlabel="ratio of the compressed part", ylabel="KL(dense || variant), nats", yscale="log")
        for kind, (marker, color) in MARKERS.items():
            placed = [row for row in rows if row["kind"] == kind and row["ratio"] is not None]
            x = [row["ratio"] for row in placed]
            y = [max(row[metric], SMALLEST_KL) for row in placed]
            bars = [min(row.get(f"{metric}_spread") or 0.0, 0.99 * kl) for row, kl in zip(placed, y, strict=True)]
            style: dict[str, Any] = {"linestyle": "none", "marker": marker, "color": color, "elinewidth": 0.8}
            axes.errorbar(x, y, yerr=bars, label=LABELS[kind], **style)
        for row in rows:
            if row["ratio"] is None:
                axes.axhline(max(row[metric], SMALLEST_KL), color="0.45", linestyle=":", label=row["name"])
        axes.grid(alpha=0.3)
        axes.margins(x=0.2, y=0.1)
        axes.legend(fontsize=8, loc="lower right")
        points = [
            (row["ratio"], max(row[metric], SMALLEST_KL), row["name"]) for row in rows if row["ratio"] is not None
        ]
        _label(axes, points)
    figure.savefig(path, dpi=150)


def _label(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points, each pushed up past the names that are already there."""
    taken: list[tuple[float, float]] = []
    for x, y, name in sorted(points, key=lambda point: point[1]):
        left, bottom = axes.transData.transform((x, y))
        place = bottom
        for other_left, other_bottom in taken:  # in pixels, upwards
            if abs(left - other_left) < 80 and abs(place - other_bottom) < 10:
                place = other_bottom + 10
        taken.append((left, place))
        offset = (5, (place - bottom) * 72 / axes.figure.dpi - 2)
        axes.annotate(name, (x, y), xytext=offset, textcoords="offset points", fontsize=7)
