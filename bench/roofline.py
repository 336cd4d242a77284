"""What a decode step moves and multiplies beside dense attention, and the least time that takes on a GPU.

python -m bench.roofline [--json FILE] [--contexts 4096,65536] [--batches 1,8] [--devices H200]

Bytes are counted from the launches themselves (see bench/traffic.py), router included; dense attention reads K and V
once. A launch takes at least 5 microseconds, its bytes over the bandwidth and its products over the peak, whichever is
longest; nothing of this is a measurement. "balanced" has widths of the kind that the preset fits, in a routed group and
in one that attends all of its blocks, as three quarters of the heads do there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.launches import FITTED, Geometry, decode_step, launches
from bench.traffic import Traffic, traffic
from dkv.config import EVERY_BLOCK
from dkv.types import BlockFormat

LAUNCH = 5e-6  # seconds of a kernel that does nothing
CONTEXTS = (4096, 16384, 65536, 131072, 262144, 1048576)
BATCHES = (1, 8, 64)
KV_HEADS = (2, 8)
WINDOW = 1024


class Device(NamedTuple):
    """Memory bandwidth in bytes per second, and peak operations per second: 16-bit without sparsity, and float32."""

    bandwidth: float
    half: float
    single: float


# of the makers' data sheets: NVIDIA A100 80GB SXM, H100 SXM and H200 SXM, AMD Instinct MI300X
DEVICES = {
    "A100": Device(2.039e12, 312e12, 19.5e12),
    "H100": Device(3.35e12, 989e12, 67e12),
    "H200": Device(4.8e12, 989e12, 67e12),
    "MI300X": Device(5.3e12, 1307e12, 163.4e12),
}
PRESETS: dict[str, dict[str, Any]] = {
    "default": {"format": BlockFormat(), "router": "lowrank"},
    "balanced": {"format": FITTED, "router": "keys"},
    "balanced, every block": {"format": FITTED, "router": "keys", "top_k": EVERY_BLOCK},
}


def geometry(preset: str, context: int, batch: int, num_kv_heads: int, group: int = 4) -> Geometry:
    """A bfloat16 layer of head size 128 whose newest tokens, 1024 and what does not fill a block, are exact."""
    settings = PRESETS[preset]
    size = settings["format"].block_size
    blocks = max(1, (context - WINDOW) // size)
    shape = {"batch": batch, "num_kv_heads": num_kv_heads, "group": group, "num_blocks": blocks}
    return Geometry(**shape, window=context - blocks * size, **settings)


def step_traffic(g: Geometry) -> list[tuple[str, Traffic]]:
    """Every launch of a decode step, by kernel; nothing is routed where every block is attended."""
    step = launches("decode_attention", g) if g.top_k >= g.num_blocks else decode_step(g)
    return [(launch.name, traffic(launch)) for launch in step]


def dense_traffic(g: Geometry, context: int) -> Traffic:
    """Attention over all rows that reads K and V once, whatever it takes to do so."""
    made, heads, rows = Traffic(), g.batch * g.num_kv_heads, g.group * g.q_len
    made.read("window", context * (g.head_dim + g.dim_v) * 2, heads)
    made.read("q", rows * g.head_dim * 2, heads)
    made.writes = heads * rows * (g.dim_v * 2 + 4)
    made.flops["bf16"] = 2 * heads * rows * context * (g.head_dim + g.dim_v)
    return made


def seconds(made: Traffic, device: Device, unique: bool = False) -> float:
    """The least time of a launch."""
    bytes_moved = (made.unique_reads if unique else made.all_reads) + made.writes
    single = made.flops.get("fp32", 0)
    products = (sum(made.flops.values()) - single) / device.half + single / device.single
    return max(LAUNCH, bytes_moved / device.bandwidth, products)


def row(preset: str, context: int, batch: int, num_kv_heads: int) -> dict[str, Any]:
    g = geometry(preset, context, batch, num_kv_heads)
    step, dense = step_traffic(g), dense_traffic(g, context)
    total = {name: sum(getattr(made, name) for _, made in step) for name in ("all_reads", "unique_reads", "writes")}
    router = sum(made.all_reads for name, made in step if name not in ("attend", "_merge"))
    times = {
        name: {
            "us": 1e6 * sum(seconds(made, device) for _, made in step),
            "unique_us": 1e6 * sum(seconds(made, device, unique=True) for _, made in step),
            "dense_us": 1e6 * seconds(dense, device),
            "floor_us": 1e6 * LAUNCH * len(step),
        }
        for name, device in DEVICES.items()
    }
    return {
        "preset": preset,
        "context": context,
        "batch": batch,
        "num_kv_heads": num_kv_heads,
        "all_reads": total["all_reads"],
        "unique_reads": total["unique_reads"],
        "writes": total["writes"],
        "router_reads": router,
        "dense_reads": dense.all_reads,
        "reads_ratio": dense.all_reads / total["all_reads"],
        "unique_ratio": dense.all_reads / total["unique_reads"],
        "flops": sum(sum(made.flops.values()) for _, made in step),
        "dense_flops": sum(dense.flops.values()),
        "kernels": [{"kernel": name, **dataclasses.asdict(made)} for name, made in step],
        "times": times,
    }


def table(rows: list[dict[str, Any]], devices: list[str]) -> Table:
    shown = Table(
        title="Bytes read by one decode step of a layer, and the least microseconds it takes (dense beside it)"
    )
    for name in ("preset", "context", "batch", "Hkv", "MB, all", "unique", "router", "dense MB", "ratio", "GFLOP"):
        shown.add_column(name, justify="left" if name == "preset" else "right")
    shown.add_column("launches", justify="right")
    for name in devices:
        shown.add_column(name, justify="right")
    for each in rows:
        megabytes = [
            f"{each[name] / 1e6:,.2f}" for name in ("all_reads", "unique_reads", "router_reads", "dense_reads")
        ]
        times = [f"{each['times'][name]['us']:,.0f} / {each['times'][name]['dense_us']:,.0f}" for name in devices]
        shown.add_row(
            each["preset"],
            f"{each['context']:,}",
            str(each["batch"]),
            str(each["num_kv_heads"]),
            *megabytes,
            f"{each['reads_ratio']:.1f}x",
            f"{each['flops'] / 1e9:,.2f}",
            str(len(each["kernels"])),
            *times,
        )
    return shown


def run(contexts: list[int], batches: list[int]) -> list[dict[str, Any]]:
    shapes = [
        (preset, context, batch, heads)
        for preset in PRESETS
        for heads in KV_HEADS
        for batch in batches
        for context in contexts
    ]
    return [row(*shape) for shape in shapes]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--devices", default=",".join(DEVICES))
    options = parser.parse_args(arguments)
    devices = options.devices.split(",")
    if set(devices) - set(DEVICES):
        parser.error(f"--devices must be of {', '.join(DEVICES)}, got {options.devices}")
    rows = run([int(x) for x in options.contexts.split(",")], [int(x) for x in options.batches.split(",")])
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    console = Console(width=None if sys.stdout.isatty() else 190)
    console.print(table(rows, devices))
    print(
        "all: every program's reads; unique: every address once. ratio: dense reads over all reads, router included.\n"
        f"Every launch takes {1e6 * LAUNCH:g} us or more; times leave out what torch launches between the kernels."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
