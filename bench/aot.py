"""Compile every kernel in every configuration that a launcher may choose, for GPUs that are not there.

python -m bench.aot --json FILE [--targets sm_90,gfx942] [--ops decode_attention,...] [--quick] [--geometries N]

Exits with 1 where a kernel does not compile, does not fit into shared memory, multiplies 16-bit numbers without the
matrix unit or any in tf32, computes an address in 32 bits, or where one that runs in a decode step spills.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # kernels are to be compiled

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.compiled import CONSUMER_SHARED, TARGETS, Specialised, compiled, specialised
from bench.launches import DECODE_OPS, FITTED, OPS, Geometry, launches
from dkv.types import BlockFormat

EXACT = BlockFormat(num_residuals=128, factor_bits=16, residual_bits=16)
FORMATS = {
    "default": BlockFormat(),
    "fitted": FITTED,
    "fitted, rank 32": dataclasses.replace(FITTED, rank=32),
    "wide": BlockFormat(rank=0, key_bits=(8, 7, 6, 5, 4, 4, 3, 3), value_bits=5),
    "nothing but means": BlockFormat(rank=0, key_bits=(0,) * 8, value_bits=0),
    "paper": EXACT,
    "64 rows": BlockFormat(num_residuals=64),
    "no rows": BlockFormat(num_residuals=0),
    "rank 128": BlockFormat(rank=128, num_residuals=64),
    "fp32": dataclasses.replace(EXACT, factor_bits=32),
    "minmax": BlockFormat(minmax=True),
    "8 bits": BlockFormat(residual_bits=8),
    "3 bits": BlockFormat(residual_bits=3, num_residuals=200),
    "block of 64": BlockFormat(block_size=64, num_residuals=63),
}
ROUTERS = ("lowrank", "keys", "residual")
PARTS_OF_A_STEP = ("lowrank_attention", "residual_attention", "reconstruct_blocks", "merge_states")  # fewer shapes do


def geometries(op: str, quick: bool) -> Iterator[tuple[str, Geometry]]:
    """Named shapes for an op: a star around the usual ones, each axis in turn, and pairs that meet in practice."""
    base = Geometry()
    yield "base", base
    if quick:
        yield "Hkv 8, fp16", dataclasses.replace(base, num_kv_heads=8, dtype="fp16")
        yield "fitted", dataclasses.replace(base, format=FITTED, router="keys")
        yield "paper", dataclasses.replace(base, format=EXACT, router="residual", share="all")
        return
    for dim in (64, 72, 80, 96, 192, 256):
        yield f"D {dim}", dataclasses.replace(base, head_dim=dim)
    yield "D 192, Dv 128", dataclasses.replace(base, head_dim=192, head_dim_v=128)
    yield "D 64, Dv 72", dataclasses.replace(base, head_dim=64, head_dim_v=72)
    for dtype in ("fp16", "fp32"):
        yield dtype, dataclasses.replace(base, dtype=dtype)
        yield f"{dtype}, D 256", dataclasses.replace(base, dtype=dtype, head_dim=256)
    for name, fmt in FORMATS.items():
        for heads in (2, 8) if name in ("default", "fitted", "paper") else (2,):
            for router in (*ROUTERS, "minmax") if fmt.minmax else ROUTERS:
                if op == "route_blocks" or router == "lowrank":
                    settings = {"format": fmt, "router": router, "num_kv_heads": heads}
                    yield f"{name}, {router}, Hkv {heads}", dataclasses.replace(base, **settings)
        for dtype in ("fp16", "fp32"):
            yield f"{name}, {dtype}", dataclasses.replace(base, format=fmt, dtype=dtype)
    if op in PARTS_OF_A_STEP:
        return
    for group in (1, 2, 3, 6, 7, 8, 16):
        yield f"group {group}", dataclasses.replace(base, group=group)
        yield f"group {group}, paper", dataclasses.replace(base, group=group, format=EXACT)
    for length in (2, 4, 16):
        yield f"Sq {length}", dataclasses.replace(base, q_len=length)
        yield f"Sq {length}, group 8", dataclasses.replace(base, q_len=length, group=8)
    for batch in (2, 8, 64):
        yield f"batch {batch}", dataclasses.replace(base, batch=batch)
        yield f"batch {batch}, Hkv 8", dataclasses.replace(base, batch=batch, num_kv_heads=8)
    for count in (1, 16, 512, 4096):
        yield f"{count} blocks", dataclasses.replace(base, num_blocks=count)
        yield f"{count} blocks, fitted", dataclasses.replace(base, num_blocks=count, format=FITTED, router="keys")
    yield "every block", dataclasses.replace(base, top_k=2**31 - 1, format=FITTED)
    yield "share all", dataclasses.replace(base, share="all")
    yield "ragged, softcap, sink", dataclasses.replace(base, ragged=True, softcap=30.0, sink=True)
    for rows in (16, 256, 4096):
        yield f"window {rows}", dataclasses.replace(base, window=rows)


def jobs(
    ops: list[str], targets: list[str], quick: bool, most: int | None = None
) -> dict[tuple[str, str], dict[str, Any]]:
    """``(target, key) -> kernel``: what is to be compiled, and for which ops and geometries."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for op in ops:
        for label, geometry in itertools.islice(geometries(op, quick), most):
            for launch in launches(op, geometry):
                for target in targets:
                    job = specialised(launch, TARGETS[target])
                    entry = found.setdefault((target, job.key), {"job": job, "kernel": launch.name, "for": []})
                    entry["options"] = {name: _plain(value) for name, value in launch.options.items()}
                    entry["for"].append(f"{op}: {label}")
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


_queue: list[tuple[Specialised, str]] = []


def _work(index: int) -> tuple[int, dict[str, Any]]:
    return index, compiled(*_queue[index])


def run(
    ops: list[str], targets: list[str], quick: bool, most: int | None, processes: int, console: Console
) -> list[dict[str, Any]]:
    """Compile everything; one row per kernel, target and specialisation."""
    found = jobs(ops, targets, quick, most)
    _queue[:] = [(entry["job"], target) for (target, _), entry in found.items()]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # thousands of files
        keys = list(found)
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            done = pool.imap_unordered(_work, range(len(keys)))
            for index, made in track(done, "Compiling", total=len(keys), console=console, transient=True):
                entry, (target, _) = found[keys[index]], keys[index]
                row = {"kernel": entry["kernel"], "target": target, "options": entry["options"]}
                row["decode"] = any(use.split(":")[0] in DECODE_OPS for use in entry["for"])
                rows.append({**row, "for": entry["for"], **made})
    return sorted(rows, key=lambda row: (row["kernel"], row["target"], str(row["options"])))


def fails(row: dict[str, Any]) -> list[str]:
    """What makes the run fail: any failure but a spill outside of a decode step."""
    return [failure for failure in row["failures"] if row["decode"] or not failure.startswith("spills")]


def table(rows: list[dict[str, Any]], consumer: bool) -> Table:
    """One line per kernel and target: the worst of its configurations."""
    shown = Table(title="Kernels by target; the worst of their configurations")
    for name in ("kernel", "target", "configurations"):
        shown.add_column(name)
    for name in ("registers", "spills", "shared", "matrix", "widest load", "narrowest"):
        shown.add_column(name, justify="right")
    shown.add_column("findings", overflow="fold")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["target"]), []).append(row)
    for (kernel, target), each in groups.items():
        good = [row for row in each if "registers" in row]
        widths = [int(width) for row in good for width in row["loads"]]
        kinds = sorted({name.split(".")[0].split("_f")[0] for row in good for name in row["matrix"]})
        findings = sorted({failure for row in each for failure in row["failures"]})
        large = sum(row["shared"] > CONSUMER_SHARED for row in good)
        if consumer and target == "sm_80" and large:
            findings.append(f"{large} need more than {CONSUMER_SHARED} bytes of shared memory")
        shown.add_row(
            kernel,
            target,
            str(len(each)),
            *(str(max((row[name] for row in good), default="-")) for name in ("registers", "spills", "shared")),
            " ".join(kinds) or "-",
            str(max(widths, default="-")),
            str(min(widths, default="-")),
            "; ".join(finding[:120] for finding in findings[:4])
            + (f"; {len(findings) - 4} more" if len(findings) > 4 else ""),
        )
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--quick", action="store_true", help="a few geometries")
    parser.add_argument("--geometries", type=int, help="no more of them than this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--consumer", action="store_true", help="say which kernels need more than 99 KiB on sm_80")
    options = parser.parse_args(arguments)
    targets, ops = options.targets.split(","), options.ops.split(",")
    for name, given, known in (("--targets", targets, TARGETS), ("--ops", ops, OPS)):
        if set(given) - set(known):
            parser.error(f"{name} must be of {', '.join(known)}, got {', '.join(given)}")
    console = Console(stderr=True)
    rows = run(ops, targets, options.quick, options.geometries, options.processes, console)
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows, options.consumer))
    failed = [row for row in rows if fails(row)]
    print(f"{len(rows)} compiled, {len(failed)} fail")
    for row in failed[:20]:
        print(f"{row['kernel']} {row['target']} {row['options']} for {row['for'][0]}: {'; '.join(fails(row))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
