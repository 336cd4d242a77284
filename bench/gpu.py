"""One run on a GPU: parity first, then decode, compression and prefill beside the best dense attention.

python -m bench.gpu --json FILE [--seconds 330] [--device cuda] [--smoke]

Exits with 1 where a kernel is not what the reference says; the times are then written without a ratio. Stops early,
with what it has, when the time is nearly up. ``--device cpu --smoke`` walks through the same code on tiny shapes under
TRITON_INTERPRET=1, where times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import dkv
from bench.launches import FITTED, Geometry, launches
from bench.parity import RESERVE, Clock, Place, parity
from dkv.config import DKVConfig
from dkv.types import CompressedBlocks

FLUSHED = 256 << 20  # bytes, more than any L2
PROMPTS = (32768, 8192, 65536)
MADE = 8  # blocks that are really compressed; the others are copies
HELPERS = 12  # processes that compile ahead


def medians(place: Place, calls: dict[str, Callable[[], Any]], repeats: int, graphs: bool) -> dict[str, float]:
    """Milliseconds of each call: they take turns, the L2 is flushed before each, the median counts."""
    if not place.on_gpu:
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(1e3 * (time.perf_counter() - start))
        return {name: statistics.median(each) for name, each in times.items()}
    runs = {name: captured(call) if graphs else warmed(call) for name, call in calls.items()}
    flush = torch.empty(FLUSHED, dtype=torch.int8, device=place.device)
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            run()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in each) for name, each in events.items()}


def warmed(call: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(2):
        call()
    return call


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph, without the host's part."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def draw(place: Place, *shape: int) -> Tensor:
    dtype = torch.bfloat16 if place.on_gpu else torch.float32
    return torch.randn(shape, device=place.device, dtype=dtype)


def dense(place: Place, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Any]]:
    """Dense attention in every form that runs here; all of ``[B, H, S, D]``."""
    attend = torch.nn.functional.scaled_dot_product_attention
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    found: dict[str, Callable[[], Any]] = {"sdpa": lambda: attend(q, k, v, is_causal=causal, enable_gqa=group > 1)}
    if length == 1:  # the query heads of a kv head as rows of one
        packed = q.reshape(q.shape[0], k.shape[1], group, q.shape[3])
        found["sdpa, packed heads"] = lambda: attend(packed, k, v)
    if not place.on_gpu:
        return found
    kinds = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, kind in kinds.items():

        def one(kind: SDPBackend = kind) -> Tensor:
            with sdpa_kernel(kind):
                return attend(q, k, v, is_causal=causal, enable_gqa=group > 1)

        found[name] = one
    found |= flash_attn(q, k, v, causal)
    return {name: call for name, call in found.items() if runs(call)}


def flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Any]]:
    """The package flash-attn, where it is installed; its rows come before heads, and decode splits the keys."""
    try:
        import flash_attn as package
    except ImportError:
        return {}
    rows_q, rows_k, rows_v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    if q.shape[2] == 1:
        return {"flash-attn": lambda: package.flash_attn_with_kvcache(rows_q, rows_k, rows_v, causal=True)}
    return {"flash-attn": lambda: package.flash_attn_func(rows_q, rows_k, rows_v, causal=causal)}


def runs(call: Callable[[], Any]) -> bool:
    """Whether this machine has that form: a backend says no by an exception."""
    try:
        call()
    except RuntimeError:
        return False
    return True


def filled(place: Place, config: DKVConfig, batch: int, heads: int, dim: int, count: int) -> CompressedBlocks:
    """``count`` blocks a sequence, copies of a few that are real; what they hold does not change the time."""
    made = min(count, MADE)
    rows = [draw(place, 1, heads, made * config.block_size, dim) for _ in range(2)]
    blocks = dkv.compress_blocks(*rows, config=config, backend="torch")
    order = torch.arange(batch * count, device=place.device) % made
    return blocks.map(lambda part: part[0, order].unflatten(0, (batch, count)).contiguous())


PRESETS = {
    "default": DKVConfig(),
    "fitted": DKVConfig(rank=0, router="keys", key_bits=FITTED.key_bits, value_bits=FITTED.value_bits),
}


def decode_shapes(smoke: bool) -> list[tuple[str, int, int, int]]:
    """Preset, batch, kv heads and context, the ones that matter most first."""
    if smoke:
        return [("default", 1, 2, 96), ("fitted", 2, 2, 96)]
    contexts = (65536, 16384, 131072, 4096)
    every = [("default", batch, heads, context) for context in contexts for batch in (8, 1) for heads in (8, 2)]
    return [*every[:8], *(("fitted", 8, 8, context) for context in contexts[:2]), *every[8:]]


def decode(place: Place, clock: Clock) -> Iterator[dict[str, Any]]:
    """A routed decode step, in CUDA graphs, beside dense attention over the same number of rows."""
    for preset, batch, heads, context in decode_shapes(place.smoke):
        if clock.fits(f"decode {preset}, batch {batch}, Hkv {heads}, {context}", 8):
            row = {"op": "decode", "preset": preset, "batch": batch, "num_kv_heads": heads, "context": context}
            yield row | {"ms": _decode_step(place, settings(place, preset), batch, heads, context)}


def settings(place: Place, preset: str) -> DKVConfig:
    config = PRESETS[preset]
    if not place.smoke:
        return config
    tiny = {"block_size": 16, "num_residuals": 15, "top_k": 2, "window": 16}
    return dataclasses.replace(config, **tiny, prefill_block=16, prefill_window=16)


def layout(config: DKVConfig, context: int) -> tuple[int, int]:
    """Blocks, and exact rows of the window."""
    count = (context - config.window) // config.block_size
    return count, context - count * config.block_size


def _decode_step(place: Place, config: DKVConfig, batch: int, heads: int, context: int) -> dict[str, float]:
    group, dim = (2, 16) if place.smoke else (4, 128)
    count, window = layout(config, context)
    q, k, v = (draw(place, batch, h, n, dim) for h, n in ((heads * group, 1), (heads, context), (heads, context)))
    blocks = filled(place, config, batch, heads, dim, count)
    newest = [x[:, :, -window:].contiguous() for x in (k, v)]
    calls: dict[str, Callable[[], Any]] = {
        "dkv": lambda: dkv.decode_attention(q, blocks, *newest, config=config, backend="triton")
    }
    with torch.inference_mode():
        return medians(place, calls | dense(place, q, k, v, causal=False), 3 if place.smoke else 25, graphs=True)


def compared(row: dict[str, Any], place: Place, ok: bool) -> dict[str, Any]:
    """A row with, where kernels are right and times are a GPU's, the ratio to the best dense form."""
    ms: dict[str, float] = row["ms"]
    others = {name: value for name, value in ms.items() if name not in ("dkv", "torch backend")}
    best = min(others, key=others.__getitem__, default=None)
    told = ok and place.on_gpu and best is not None
    ratio = round(others[best] / ms["dkv"], 3) if told and best is not None else None
    return {**row, "ms": {name: round(value, 5) for name, value in ms.items()}, "best_dense": best, "ratio": ratio}


def prefill(place: Place, clock: Clock) -> Iterator[dict[str, Any]]:
    """Block-sparse causal attention over a prompt."""
    heads = 2 if place.smoke else 8
    for tokens in (64,) if place.smoke else PROMPTS:
        if clock.fits(f"prefill {tokens}", 10):
            row = {"op": "prefill", "preset": "default", "batch": 1, "num_kv_heads": heads, "context": tokens}
            yield row | {"ms": _prefill(place, settings(place, "default"), heads, tokens)}


def _prefill(place: Place, config: DKVConfig, heads: int, tokens: int) -> dict[str, float]:
    group, dim = (2, 16) if place.smoke else (4, 128)
    q, k, v = (draw(place, 1, h, tokens, dim) for h in (heads * group, heads, heads))
    calls: dict[str, Callable[[], Any]] = {
        "dkv": lambda: dkv.prefill_attention(q, k, v, config=config, backend="triton")
    }
    with torch.inference_mode():
        return medians(place, calls | dense(place, q, k, v, causal=True), 3 if place.smoke else 7, graphs=False)


def compress(place: Place, clock: Clock) -> Iterator[dict[str, Any]]:
    """Compression of a prompt's rows, beside the torch backend; there is nothing dense to beat."""
    heads, tokens = (2, 32) if place.smoke else (8, 16384)
    for preset in ("default",) if place.smoke else tuple(PRESETS):
        if clock.fits(f"compress {preset}", 12):
            row = {"op": "compress", "preset": preset, "batch": 1, "num_kv_heads": heads, "context": tokens}
            yield row | {"ms": _compress(place, settings(place, preset), heads, tokens)}


def _compress(place: Place, config: DKVConfig, heads: int, tokens: int) -> dict[str, float]:
    k, v = (draw(place, 1, heads, tokens, 16 if place.smoke else 128) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {
        "dkv": lambda: dkv.compress_blocks(k, v, config=config, backend="triton"),
        "torch backend": lambda: dkv.compress_blocks(k, v, config=config, backend="torch"),
    }
    with torch.inference_mode():
        return medians(place, calls, 2 if place.smoke else 5, graphs=False)


def ahead() -> list[tuple[str, Geometry]]:
    """What the times need, so that processes compile it side by side; the rest is compiled on first use."""
    found = []
    for preset, batch, heads, context in decode_shapes(False):
        config = PRESETS[preset]
        count, window = layout(config, context)
        shape = {"batch": batch, "num_kv_heads": heads, "num_blocks": count, "window": window}
        g = Geometry(**shape, format=config.block_format, router=config.router)
        found += [("route_blocks", g), ("decode_attention", g)]
    found += [("prefill_attention", Geometry(num_kv_heads=8, tokens=tokens)) for tokens in PROMPTS]
    return found + [("compress_blocks", Geometry(num_kv_heads=8, format=c.block_format)) for c in PRESETS.values()]


def _compile(work: tuple[str, Geometry, int]) -> str:
    """Fill the cache on disk for one call; what went wrong, in words."""
    op, geometry, capability = work
    try:
        from bench.compiled import GPUTarget, specialised  # of Triton's inside, which another version may have changed

        target = GPUTarget("cuda", capability, 32)
        for launch in launches(op, geometry):
            job = specialised(launch, target)
            triton.compile(job.source, target=target, options=job.options)
    except Exception as error:  # compiled again on first use, where it fails in the open
        return f"{op}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def compile_ahead(place: Place) -> dict[str, Any]:
    """Compile in other processes before the first kernel runs."""
    if not place.on_gpu or torch.version.hip is not None:
        return {"seconds": 0.0, "failed": []}
    start = time.perf_counter()
    major, minor = torch.cuda.get_device_capability(place.device)
    work = [(op, geometry, 10 * major + minor) for op, geometry in ahead()]
    processes = min(HELPERS, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        said = pool.map(_compile, work, chunksize=1)
    return {"seconds": round(time.perf_counter() - start, 1), "failed": sorted({each for each in said if each})}


def tables(result: dict[str, Any]) -> list[Table]:
    shown = Table(title=f"Parity with the float64 reference on {result['name']}")
    for name in ("op", "case", "result", "s"):
        shown.add_column(name, overflow="fold")
    for row in result["parity"]:
        shown.add_row(row["op"], row["case"], "ok" if row["ok"] else f"RED {row['said']}", f"{row['seconds']:.1f}")
    times = Table(title="Median milliseconds, taking turns, L2 flushed before each")
    for name in ("op", "preset", "batch", "Hkv", "context", "dkv", "best dense", "ms", "dense / dkv", "all others"):
        times.add_column(name, justify="left" if name in ("op", "preset", "best dense", "all others") else "right")
    for row in result["times"]:
        best = row["best_dense"]
        others = {name: value for name, value in row["ms"].items() if name not in ("dkv", best)}
        times.add_row(
            row["op"],
            row["preset"],
            *(f"{row[name]:,}" for name in ("batch", "num_kv_heads", "context")),
            f"{row['ms']['dkv']:.4f}",
            best or "-",
            f"{row['ms'][best]:.4f}" if best else "-",
            f"{row['ratio']:.2f}x" if row["ratio"] is not None else "-",
            ", ".join(f"{name} {value:.4f}" for name, value in others.items()),
        )
    return [shown, times]


def run(place: Place, seconds: float, console: Console, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Everything that fits into ``seconds``; ``save`` gets what there is after every row."""
    clock = Clock(seconds)
    torch.manual_seed(0)
    name = torch.cuda.get_device_name(place.device) if place.on_gpu else "a CPU, interpreted"
    result: dict[str, Any] = {"name": name, "torch": torch.__version__, "triton": triton.__version__}
    result |= {"dkv": dkv.__version__, "smoke": place.smoke, "times": [], "broken": []}
    console.print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    result["compiled_ahead"] = compile_ahead(place)
    result["parity"] = parity(place, clock)
    red = [row for row in result["parity"] if not row["ok"]]
    ok = result["parity_ok"] = bool(result["parity"]) and not red
    console.print(f"{len(result['parity'])} cases of parity, {len(red)} red, after {clock.spent:.0f} s")
    for part in (decode, prefill, compress):
        try:
            for row in part(place, clock):
                result["times"].append(compared(row, place, ok))
                save(result)
        except Exception as error:  # the other parts are still worth their time
            said = f"{part.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            result["broken"].append(said)
        console.print(f"{part.__name__} done after {clock.spent:.0f} s")
    result["skipped"], result["seconds"] = clock.skipped, round(clock.spent, 1)
    save(result)
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    options = parser.parse_args(arguments)
    place = Place(options.device, options.smoke)
    if not place.on_gpu and not options.smoke:
        parser.error("a CPU runs --smoke alone: its times mean nothing")
    if not math.isfinite(options.seconds) or options.seconds <= RESERVE:
        parser.error(f"--seconds must be more than {RESERVE:g}")
    console = Console(width=None if sys.stdout.isatty() else 180)

    def save(result: dict[str, Any]) -> None:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)

    result = run(place, options.seconds, console, save)
    for each in tables(result):
        console.print(each)
    if not result["parity_ok"]:
        console.print("Parity is red: no ratio is shown, and the times are of kernels that are wrong.")
    if result["skipped"]:
        console.print(f"Stopped early: {len(result['skipped'])} left out ({'; '.join(result['skipped'][:4])} ...)")
    for said in (*result["compiled_ahead"]["failed"], *result["broken"]):
        console.print(said, markup=False)
    return 0 if result["parity_ok"] and not result["broken"] else 1


if __name__ == "__main__":
    sys.exit(main())
