"""README's picture: memory of the cache against the context, what is lost against the ratio, and recall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.ticker import PercentFormatter

from dkv.benches import memory, plots

SHAPE = memory.GEOMETRIES[-1]  # SmolLM2-135M, of which there are fidelity and recall too
STYLES: dict[str, dict[str, Any]] = {
    "dense": {"color": "0.35", "linestyle": "--"},
    "paper R=128": {"color": "C4"},
    "paper R=64": {"color": "C1"},
    "int4": {"color": "C2", "linestyle": "-."},
    "default": {"color": "C0"},
    "small": {"color": "C3"},
}
LABELS = {"paper R=128": "published DKV, R=128", "paper R=64": "published DKV, R=64", "small": 'preset "small"'}
MEMORY = ("paper R=64", "int4", "default", "small")


def draw(results: dict[str, Any], path: Path) -> None:
    """Three panels from memory.json's geometry, fidelity.json and the recall files; those that there are."""
    figure = plots.figure(13.5, 4.2)
    left, middle, right = figure.subplots(1, 3)
    _memory(left, results.get("fidelity.json", []))
    plots.kl_against_ratio(
        middle, results.get("fidelity.json", []), "copy_kl", "What is lost: passages copied from far back"
    )
    _recall(right, [results.get(name, []) for name in ("recall.json", "recall_small.json")])
    figure.suptitle("SmolLM2-135M; first and newest tokens exact, everything between compressed", fontsize=10)
    plots.save(figure, path)


def _memory(axes: Any, rows: list[dict[str, Any]]) -> None:
    ratios = {"dense": 1.0} | {row["name"]: row["ratio"] for row in rows if row["name"] in MEMORY}
    dense = memory.dense_block_nbytes(SHAPE)
    for name, style in STYLES.items():
        if name in ratios:
            sizes = [memory.cache_nbytes(SHAPE, context, dense / ratios[name]) / 1e6 for context in memory.CONTEXTS]
            label = f"{LABELS.get(name, name)}, {ratios[name]:.1f}x" if name != "dense" else name
            axes.plot(memory.CONTEXTS, sizes, label=label, **style)
    plots.label_contexts(axes, "Memory of the KV cache", "MB, 16-bit cache", memory.CONTEXTS)
    axes.set_yscale("log")
    axes.legend(fontsize=8)


def _recall(axes: Any, files: list[list[dict[str, Any]]]) -> None:
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for row in (row for rows in files for row in rows):
        own = found.setdefault(row["variant"].removeprefix("preset "), {})
        if own.get(row["context"], (0, 0))[1] < row["trials"]:  # the longer run counts
            own[row["context"]] = row["right"], row["trials"]
    for name, style in STYLES.items():
        if name in found:
            wide = {"linewidth": 5, "alpha": 0.4} if name == "dense" else {}  # others may lie on it
            contexts = sorted(found[name])
            shares = [found[name][context][0] / found[name][context][1] for context in contexts]
            axes.plot(contexts, shares, marker="o", markersize=4, label=LABELS.get(name, name), **style, **wide)
    ticks = sorted({context for own in found.values() for context in own})
    plots.label_contexts(axes, "A buried number, asked after compression", "share recalled", ticks)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(fontsize=8, loc="lower left")
