"""Compile every kernel in every configuration that a launcher may choose, for GPUs that are not there.

python -m bench.aot --json FILE [--targets sm_90,gfx942] [--ops decode_attention,...] [--quick] [--every]

Not the product of all settings: any two values of two settings that a launcher looks at meet in at least one geometry
(:data:`AXES`), and kernels outside of a decode step are compiled for each value that occurs. That is some 160 kernels
a target; ``--quick`` takes geometries that are in use. Spills to memory count; scalar registers that go to lanes of
vector registers (AMD) are shown apart.

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
ROWS: dict[str, dict[str, Any]] = {
    "4 bits": {},
    "mixed": {"key_bits": (4, 3, 2, 2, 2, 1, 1, 0), "value_bits": 2},
    "exact": {"residual_bits": 16},
    "wide": {"key_bits": (8, 7, 6, 5, 4, 4, 3, 3), "value_bits": 5},
    "means": {"key_bits": (0,) * 8, "value_bits": 0},
}
FORMAT = {
    "rows": tuple(ROWS),
    "rank": (32, 0, 128),
    "num_residuals": (255, 0, 64),
    "factor_bits": (8, 16, 32),
    "block_size": (256, 64),
}
SHAPE: dict[str, tuple[Any, ...]] = {
    "dims": ((128, 128), (64, 64), (80, 80), (192, 128), (256, 256)),
    "dtype": ("bf16", "fp16", "fp32"),
}
QUERIES = {"group": (4, 1, 7, 16), "q_len": (1, 4, 16), "num_kv_heads": (2, 8), "batch": (1, 8)}
OTHERS = {"softcap": (None, 30.0), "sink": (False, True), "ragged": (False, True)}
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "route_blocks": {
        **FORMAT, **SHAPE, **QUERIES, "dims": tuple((dim, dim) for dim in (128, 64, 80, 192, 256)),
        "router": ("lowrank", "keys", "residual", "minmax"), "share": ("kv_head", "all"), "ragged": (False, True),
        "num_blocks": (64, 1, 512, 4096), "top_k": (16, 2**31 - 1),
    },
    "lowrank_attention": {**FORMAT, **SHAPE},
    "residual_attention": {**FORMAT, **SHAPE},
    "exact_attention": {**SHAPE, **QUERIES, **OTHERS, "window": (1280, 16, 4096)},
    "decode_attention": {
        **FORMAT, **SHAPE, **QUERIES, **OTHERS, "window": (1280, 16), "num_blocks": (64, 1, 512), "top_k": (16, 512)
    },
    "merge_states": {**SHAPE, "q_len": (1, 4, 16)},
    "compress_blocks": {**FORMAT, **SHAPE},
    "reconstruct_blocks": {**FORMAT, **SHAPE, "ragged": (False, True)},
    "prefill_attention": {**SHAPE, **QUERIES, "softcap": (None, 30.0), "sink": (False, True)},
}  # fmt: skip
STEP = ("route_blocks", "decode_attention")
IN_PAIRS = ("attend", "_score_kernel", "_minmax_kernel")  # of a decode step: what reads stored blocks


def pairs(axes: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Settings in which any two values of two axes meet at least once; the first has the first value of each axis."""
    names = sorted(axes, key=lambda name: -len(axes[name]))
    open_pairs = {
        ((one, a), (two, b)): None
        for one, two in itertools.combinations(names, 2)
        for a, b in itertools.product(range(len(axes[one])), range(len(axes[two])))
    }
    while open_pairs:
        chosen = dict(next(iter(open_pairs)))
        for name in names:
            if name not in chosen:
                others = list(chosen.items())
                values = range(len(axes[name]))
                met = [
                    sum((mine, other) in open_pairs or (other, mine) in open_pairs for other in others)
                    for mine in ((name, value) for value in values)
                ]
                chosen[name] = met.index(max(met))
        for pair in itertools.combinations([(name, chosen[name]) for name in names], 2):
            open_pairs.pop(pair, None)
        yield {name: axes[name][chosen[name]] for name in axes}


def geometry(settings: dict[str, Any]) -> Geometry:
    """The geometry of values of :data:`AXES`."""
    given = dict(settings)
    fields = {name: given.pop(name) for name in tuple(FORMAT)[1:] if name in given}
    fmt = BlockFormat(**fields, **ROWS[given.pop("rows", "4 bits")], minmax=given.get("router") == "minmax")
    given["head_dim"], given["head_dim_v"] = given.pop("dims")
    return Geometry(**given, format=fmt)


def geometries(op: str, quick: bool) -> Iterator[tuple[str, Geometry]]:
    """Named shapes for an op: three that are meant to be used, then pairs of all that a launcher looks at."""
    base = Geometry()
    yield "base", base
    if quick:
        yield "Hkv 8, fp16", dataclasses.replace(base, num_kv_heads=8, dtype="fp16")
    yield "fitted", dataclasses.replace(base, format=FITTED, router="keys")
    yield "paper", dataclasses.replace(base, format=EXACT, router="residual", share="all")
    if not quick:
        for settings in pairs(AXES[op]):
            yield ", ".join(f"{name} {value}" for name, value in settings.items()), geometry(settings)


def features(job: Specialised) -> set[tuple[str, str]]:
    """What a launch is compiled for, value by value: dtypes, constants, warps."""
    source = job.source
    given = {**source.signature, **{str(path): value for path, value in source.constants.items()}}
    return {(name, str(value)) for name, value in given.items()} | {("warps", str(job.options["num_warps"]))}


def jobs(
    ops: list[str], targets: list[str], quick: bool, most: int | None = None
) -> dict[tuple[str, str], dict[str, Any]]:
    """``(target, key) -> kernel``: what is to be compiled, and for which ops and geometries.

    Kernels of a decode step that read blocks are compiled in all geometries of their ops. Of the others, and of parts
    of a step, so many launches as it takes to meet each value that occurs: of a constant, a dtype, of warps.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for op in sorted(ops, key=lambda op: op not in STEP):
        for label, shape in itertools.islice(geometries(op, quick), most):
            for launch in launches(op, shape):
                for target in targets:
                    job = specialised(launch, TARGETS[target])
                    new = {"job": job, "kernel": launch.name, "for": [], "all": False}
                    entry = found.setdefault((target, job.key), new)
                    entry["options"] = {name: _plain(value) for name, value in launch.options.items()}
                    entry["for"].append(f"{op}: {label}")
                    entry["all"] |= op in STEP and launch.name in IN_PAIRS
    kept = _cover(found)
    return {key: entry for key, entry in found.items() if key in kept}


def _cover(found: dict[tuple[str, str], dict[str, Any]]) -> set[tuple[str, str]]:
    """Entries that are wanted, and some others of each kernel that have every value that occurs."""
    kept = {key for key, entry in found.items() if entry["all"]}
    rest: dict[tuple[str, str], dict[tuple[str, str], set[tuple[str, str]]]] = {}
    met: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for key, entry in found.items():
        kernel = key[0], entry["kernel"]
        if key in kept:
            met.setdefault(kernel, set()).update(features(entry["job"]))
        else:
            rest.setdefault(kernel, {})[key] = features(entry["job"])
    for kernel, others in rest.items():
        known = met.setdefault(kernel, set())
        while others:
            best = max(others, key=lambda key: len(others[key] - known))
            if not others[best] - known:
                break
            kept.add(best)
            known |= others.pop(best)
    return kept


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
    keys = list(found)
    made: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # thousands of files
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            done = pool.imap_unordered(_work, range(len(keys)))
            made.update(track(done, "Compiling", total=len(keys), console=console, transient=True))
    return [row_of(found[key], key[0], made[index]) for index, key in enumerate(keys)]


def row_of(entry: dict[str, Any], target: str, made: dict[str, Any]) -> dict[str, Any]:
    """A compiled kernel with what it is for."""
    decode = any(use.split(":")[0] in DECODE_OPS for use in entry["for"])
    about = {name: entry[name] for name in ("kernel", "options", "for")}
    return {"target": target, "decode": decode, **about, **made}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One object per kernel and target: the worst of its configurations, and each that spills or fails."""
    result = []
    for (kernel, target), each in _grouped(rows):
        good = [row for row in each if "registers" in row]
        widths = [int(width) for row in good for width in row["loads"]]
        shown: dict[str, Any] = {"kernel": kernel, "target": target, "configurations": len(each)}
        for name in ("registers", "spills", "scalar_spills", "stack", "shared"):
            shown[name] = max((row.get(name, 0) for row in good), default=None)
        shown["matrix"] = sorted({name.split(".")[0].split("_f")[0] for row in good for name in row["matrix"]})
        shown["widest_load"], shown["narrowest_load"] = max(widths, default=None), min(widths, default=None)
        shown["findings"] = [
            {"for": row["for"][0], "fails": bool(fails(row)), "found": row["failures"], "options": row["options"]}
            for row in each
            if row["failures"]
        ]
        result.append(shown)
    return result


def _grouped(rows: list[dict[str, Any]]) -> list[tuple[tuple[str, str], list[dict[str, Any]]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["target"]), []).append(row)
    return sorted(groups.items(), key=lambda group: group[0])


def fails(row: dict[str, Any]) -> list[str]:
    """What makes the run fail: any failure but a spill outside of a decode step."""
    return [failure for failure in row["failures"] if row["decode"] or not failure.startswith("spills")]


def table(rows: list[dict[str, Any]], consumer: bool) -> Table:
    """One line per kernel and target: the worst of its configurations."""
    shown = Table(title="Kernels by target; the worst of their configurations")
    for name in ("kernel", "target", "configurations"):
        shown.add_column(name)
    for name in ("registers", "spills", "scalar spills", "shared", "matrix", "widest load", "narrowest"):
        shown.add_column(name, justify="right")
    shown.add_column("findings", overflow="fold")
    for line, (_, each) in zip(summary(rows), _grouped(rows), strict=True):
        findings = sorted({failure for found in line["findings"] for failure in found["found"]})
        large = sum(row.get("shared", 0) > CONSUMER_SHARED for row in each)
        if consumer and line["target"] == "sm_80" and large:
            findings.append(f"{large} need more than {CONSUMER_SHARED} bytes of shared memory")
        names = ("registers", "spills", "scalar_spills", "shared", "widest_load", "narrowest_load")
        numbers = ["-" if line[name] is None else str(line[name]) for name in names]
        more = f"; {len(findings) - 4} more" if len(findings) > 4 else ""
        shown.add_row(
            line["kernel"],
            line["target"],
            str(line["configurations"]),
            *numbers[:4],
            " ".join(line["matrix"]) or "-",
            *numbers[4:],
            "; ".join(finding[:120] for finding in findings[:4]) + more,
        )
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--quick", action="store_true", help="a few geometries")
    parser.add_argument("--geometries", type=int, help="no more of them than this")
    parser.add_argument("--every", action="store_true", help="write every configuration, not the worst by kernel")
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
        json.dump(rows if options.every else summary(rows), file, indent=1)
        file.write("\n")
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows, options.consumer))
    failed = [row for row in rows if fails(row)]
    print(f"{len(rows)} compiled, {len(failed)} fail")
    for row in failed[:20]:
        print(f"{row['kernel']} {row['target']} {row['options']} for {row['for'][0]}: {'; '.join(fails(row))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
