"""Pictures of what was measured. They need matplotlib, which the extra ``plot`` brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dkv._paths import replaced

DEPTHS = 5  # bands of a heat map whose passcodes lie anywhere
Curve = tuple[Sequence[float], Sequence[float]]
MARKERS = {"floor": ("x", "0.45"), "published": ("D", "C1"), "dkv": ("o", "C0"), "peer": ("s", "C2")}
LABELS = {"floor": "floors", "published": "published DKV", "dkv": "DKV", "peer": "peers"}
SMALLEST_KL = 1e-7  # float32 rounding; a log axis has no room for less


def fidelity(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw the rows of :func:`dkv.benches.fidelity.run`: KL against ratio, one panel for each kind of continuation.

    What stores nothing has no ratio and is drawn as a line across.
    """
    picture = figure(11, 5)
    for panel, (metric, title) in enumerate((("std_kl", "next tokens"), ("copy_kl", "copied from far back"))):
        kl_against_ratio(picture.add_subplot(1, 2, panel + 1), rows, metric, title)
    save(picture, path)


def kl_against_ratio(axes: Any, rows: Sequence[dict[str, Any]], metric: str, title: str) -> None:
    """One panel of :func:`fidelity`."""
    axes.set(title=title, xlabel="ratio of the compressed part", ylabel="KL(dense || variant), nats", yscale="log")
    for kind, (marker, color) in MARKERS.items():
        placed = [row for row in rows if _kind(row) == kind and row["ratio"] is not None]
        if not placed:
            continue
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
    points = [(row["ratio"], max(row[metric], SMALLEST_KL), row["name"]) for row in rows if row["ratio"] is not None]
    _label(axes, points)


def _kind(row: dict[str, Any]) -> str:
    return "published" if row["name"].startswith("paper") else str(row["kind"])


def _label(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points, each pushed up past the names that are already there."""
    axes.figure.draw_without_rendering()  # places the axes
    dots = [axes.transData.transform(point[:2]) for point in points]
    taken = [(x - 4, x + 4, y) for x, y in dots]  # left, right, middle in pixels
    for (dot, bottom), (x, y, name) in sorted(zip(dots, points, strict=True), key=lambda each: each[0][1]):
        left, right, place = dot + 5, dot + 8 + 5.5 * len(name), bottom
        for other_left, other_right, other in sorted(taken, key=lambda each: each[2]):  # upwards
            if left < other_right and other_left < right and abs(place - other) < 10:
                place = other + 10
        taken.append((left, right, place))
        offset = (5, (place - bottom) * 72 / axes.figure.dpi - 2)
        axes.annotate(name, (x, y), xytext=offset, textcoords="offset points", fontsize=7)


def recall(rows: Sequence[dict[str, Any]], path: str | Path, bands: int = DEPTHS) -> None:
    """Draw the rows of :func:`dkv.benches.recall.run`: a heat map per variant, context by depth, right answers in it.

    ``bands`` depths are told apart; a cell where nothing was asked stays empty.
    """
    import numpy as np

    variants = list(dict.fromkeys(row["variant"] for row in rows))
    contexts = sorted({row["context"] for row in rows})
    picture = figure(1.5 + len(variants) * max(2.2, 0.8 * len(contexts)), 1.8 + 0.35 * bands)
    panels = picture.subplots(1, len(variants), sharey=True, squeeze=False)[0]
    for axes, variant in zip(panels, variants, strict=True):
        right, asked = answered([row for row in rows if row["variant"] == variant], contexts, bands)
        share = np.ma.masked_where(asked == 0, right / np.maximum(asked, 1))
        image = axes.imshow(share, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for (band, column), count in np.ndenumerate(asked):
            if count:
                text = f"{right[band, column]:.0f}/{count:.0f}"
                dark = share[band, column] < 0.6
                axes.text(column, band, text, ha="center", va="center", color="w" if dark else "k", fontsize=7)
        axes.set(title=variant, xlabel="context, tokens", xticks=range(len(contexts)), yticks=range(bands))
        axes.set_xticklabels([f"{context:,}" for context in contexts], rotation=45, ha="right")
        axes.set_yticklabels([f"{band / bands:.0%} to {(band + 1) / bands:.0%}" for band in range(bands)])
    panels[0].set_ylabel("depth of the passcode")
    picture.colorbar(image, ax=list(panels), label="share recalled", pad=0.01)
    save(picture, path)


def answered(rows: Sequence[dict[str, Any]], contexts: Sequence[int], bands: int) -> tuple[Any, Any]:
    """Right answers and questions of one variant, ``[bands, contexts]`` each."""
    import numpy as np

    right, asked = np.zeros((bands, len(contexts))), np.zeros((bands, len(contexts)))
    for row in rows:
        for answer in row["answers"]:
            cell = min(int(answer["depth"] * bands), bands - 1), contexts.index(row["context"])
            asked[cell] += 1
            right[cell] += answer["right"]
    return right, asked


def times(rows: Sequence[dict[str, Any]], path: str | Path, title: str) -> None:
    """Draw the rows of :func:`dkv.benches.decode.run` or of ``prefill.run``: milliseconds against the context."""
    names = {"DKV": "ms", "best dense": "dense_ms", "SDPA": "sdpa_ms"}
    if all(row["dense_ms"] == row["sdpa_ms"] for row in rows):
        del names["best dense"]
    contexts = [row["context"] for row in rows]
    found = {name: (contexts, [row[key] for row in rows]) for name, key in names.items()}
    curves({title: ("ms", found)}, path)


def memory(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw the rows of :func:`dkv.benches.memory.run`: bytes of a whole cache against the context, by model."""
    from dkv.benches.memory import GEOMETRIES, cache_curves

    panels = {}
    for shape in GEOMETRIES:
        found = {name: (x, [each / 1e6 for each in y]) for name, (x, y) in cache_curves(rows, shape).items()}
        panels[f"{shape.model}, float16"] = ("MB of KV cache", found)
    curves(panels, path)


def engines(rows: Sequence[dict[str, Any]], path: str | Path, title: str) -> None:
    """Draw the rows of :func:`dkv.benches.mlx_lm.run`: prefill, decode and bytes against the context."""

    def by_engine(value: Any) -> dict[str, Curve]:
        found: dict[str, Curve] = {}
        for engine in dict.fromkeys(row["engine"] for row in rows):
            own = [row for row in rows if row["engine"] == engine]
            found[engine] = ([row["context"] for row in own], [value(row) for row in own])
        return found

    panels = {
        "prefill": ("seconds", by_engine(lambda row: row["prefill_seconds"])),
        "decode": ("seconds per token", by_engine(lambda row: 1 / row["decode_tokens_per_second"])),
        "KV cache": ("MB", by_engine(lambda row: row["kv_bytes"] / 1e6)),
    }
    curves(panels, path, title)


def curves(panels: Mapping[str, tuple[str, Mapping[str, Curve]]], path: str | Path, title: str = "") -> None:
    """Curves against the context, both axes logarithmic: ``title -> (label of y, name -> (x, y))``."""
    picture = figure(0.5 + 4.5 * len(panels), 4)
    for index, (name, (label, found)) in enumerate(panels.items()):
        against_context(picture.add_subplot(1, len(panels), index + 1), name, label, found)
    if title:
        picture.suptitle(title)
    save(picture, path)


def against_context(axes: Any, title: str, label: str, found: Mapping[str, Curve]) -> None:
    """One panel of :func:`curves`; dense attention is drawn in grey."""
    for name, (x, y) in found.items():
        dense = "dense" in name
        style = {"color": "0.35", "linestyle": "--" if dense else ":"} if dense or name == "SDPA" else {}
        axes.plot(x, y, marker=None if len(x) > 9 else ("s" if dense else "o"), markersize=4, label=name, **style)
    ticks = sorted({each for x, _ in found.values() for each in x})
    label_contexts(axes, title, label, ticks)
    axes.set_yscale("log")
    axes.legend(fontsize=8)


def label_contexts(axes: Any, title: str, label: str, contexts: Sequence[float]) -> None:
    """The axis of the contexts: logarithmic, its ticks at those that were measured, or at some of them."""
    axes.set(title=title, xlabel="context, tokens", ylabel=label, xscale="log")
    ticks = contexts[:: -(-len(contexts) // 7)]
    axes.set_xticks(ticks, [_tokens(each) for each in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _tokens(number: float) -> str:
    if number % 512:
        return f"{number:,}"
    return f"{number / 1024:g}k" if number < 1 << 20 else f"{number / (1 << 20):g}M"


def figure(width: float, height: float) -> Any:
    """A figure of its own: no window, no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: Any, path: str | Path) -> None:
    """Write a picture by its suffix, whole or not at all, and the same bytes every time."""
    import matplotlib

    kind = Path(path).suffix[1:]
    dated = {"svg": "Date", "pdf": "CreationDate"}
    with replaced(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "dkv"}):
        figure.savefig(temporary, format=kind, dpi=150, metadata={dated[kind]: None} if kind in dated else None)
