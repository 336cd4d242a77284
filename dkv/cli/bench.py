"""``dkv bench memory``, ``dkv bench decode`` and ``dkv bench prefill``; ``dkv bench mlx`` has a file of its own."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from dkv.cli import _common, bench_mlx
from dkv.cli._common import CliError, out
from dkv.config import DKVConfig
from dkv.models import require

EXAMPLES = {
    "memory": _common.examples("dkv bench memory", "dkv bench memory --json memory.json --plot memory.svg"),
    "decode": _common.examples(
        "dkv bench decode",
        "dkv bench decode --contexts 4096,65536 --top-k 8 --json decode.json --plot decode.pdf",
        "dkv bench decode --device cuda --dtype bfloat16",
    ),
    "prefill": _common.examples(
        "dkv bench prefill --contexts 4096,16384 --repeats 1",
        "dkv bench prefill --json prefill.json --plot prefill.png",
    ),
}
app = typer.Typer(help="Measure bytes and times.", rich_markup_mode=None)

app.command("mlx", short_help="DKV beside dense mlx-lm.", epilog=bench_mlx.EXAMPLES)(bench_mlx.mlx)


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        out.print(context.get_help())
        raise typer.Exit()


@app.command(short_help="Bytes of a compressed block.", epilog=EXAMPLES["memory"])
def memory(seed: _common.SeedOption = 0, json_file: _common.JsonOption = None, plot: _common.PlotOption = None) -> None:
    """Bytes of one compressed block and layer, counted from real arrays.

    --plot draws the bytes of a whole cache against the context, the default's window and sink tokens included.
    """
    show = _common.check_outputs(json_file, plot)
    from dkv.benches import memory as measure

    with _common.status("Compressing"):
        rows = measure.run(seed)
    table = Table(title="One block of 256 tokens in one layer, float16 cache")
    table.add_column("model")
    table.add_column("layout")
    for column in ("bytes", "dense bytes", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            row["layout"],
            f"{row['bytes_per_block_layer']:,}",
            f"{row['dense_bytes']:,}",
            f"{row['ratio']:.2f}x",
        )
    show.print(table)
    show.print(measure.FOOTNOTE)
    _common.write_json(json_file, rows)
    if plot is not None:
        from dkv.benches import plots

        with _common.writing(plot):
            plots.memory(rows, plot)


@app.command(short_help="Time of a decode step.", epilog=EXAMPLES["decode"])
def decode(
    contexts: Annotated[str, typer.Option(help="Context lengths in tokens, with commas.")] = (
        "4096,16384,65536,131072,262144"
    ),
    dtype: _common.DtypeOption = "float32",
    device: _common.DeviceOption = "cpu",
    top_k: Annotated[int, typer.Option(help="Blocks that a step attends.")] = 16,
    route_every: Annotated[int, typer.Option(help="Steps from one scan of all blocks to the next.")] = (
        DKVConfig.route_every
    ),
    repeats: Annotated[int, typer.Option(help="Timed routing periods; the median counts.")] = 15,
    seed: _common.SeedOption = 0,
    json_file: _common.JsonOption = None,
    plot: _common.PlotOption = None,
) -> None:
    """Time one decode step of one layer (Qwen2.5-1.5B geometry) beside dense attention."""
    lengths = _common.integers("--contexts", contexts)
    _common.at_least("--repeats", repeats, 1)
    _common.check_dtype(dtype)
    config = _common.make_config(top_k=top_k, route_every=route_every)
    show = _common.check_outputs(json_file, plot)
    torch = require("torch")
    from dkv.benches import decode as measure

    least = config.sink_tokens + config.window + config.block_size
    if min(lengths) < least:
        raise CliError(f"--contexts must be {least:,} or more: sink, window and one block")
    try:
        with _common.progress(len(lengths)) as advance:
            rows = measure.run(lengths, getattr(torch, dtype), config, repeats, seed, device, progress=advance)
    except (AssertionError, RuntimeError, MemoryError) as error:  # torch without that device, or not enough memory
        raise CliError(f"cannot run on {device!r}: {' '.join(str(error).split())[:200]}") from error
    table = Table(title=f"One decode step of one layer, {dtype}, {rows[0]['threads']} threads, median of {repeats}")
    for column in ("context", "DKV ms", "scan", "no scan", "best dense ms", "SDPA ms", "dense / DKV"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['context']:,}",
            f"{row['ms']:.2f}",
            f"{row['route_ms']:.2f}",
            "-" if row["other_ms"] is None else f"{row['other_ms']:.2f}",
            f"{row['dense_ms']:.2f}",
            f"{row['sdpa_ms']:.2f}",
            f"{row['ratio']:.2f}x",
        )
    show.print(table)
    show.print(
        f"DKV selects {top_k} blocks of 256 in every step: from all of them every {route_every} steps, else from the "
        f"{config.route_candidates} best of the last scan and those that follow the selected ones. It attends sink and "
        "window exactly and closes a block every 256; ms is the mean of a step. Best dense is one bmm per kv head."
    )
    _common.write_json(json_file, rows)
    if plot is not None:
        from dkv.benches import plots

        with _common.writing(plot):
            plots.times(rows, plot, f"One decode step of one layer, {dtype}")


@app.command(short_help="Time of a prompt.", epilog=EXAMPLES["prefill"])
def prefill(
    contexts: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, with commas.")
    ] = "4096,8192,16384,32768,65536",
    dtype: _common.DtypeOption = "float32",
    device: _common.DeviceOption = "cpu",
    repeats: Annotated[int, typer.Option(help="Turns up to 16,384 tokens; the median counts.")] = 3,
    seed: _common.SeedOption = 0,
    json_file: _common.JsonOption = None,
    plot: _common.PlotOption = None,
) -> None:
    """Time the attention of one layer (Qwen2.5-1.5B geometry) over a whole prompt beside dense attention."""
    lengths = _common.integers("--contexts", contexts)
    _common.at_least("--repeats", repeats, 1)
    _common.check_dtype(dtype)
    show = _common.check_outputs(json_file, plot)
    torch = require("torch")
    from dkv.benches import prefill as measure

    try:
        with _common.progress(len(lengths)) as advance:
            rows = measure.run(lengths, getattr(torch, dtype), None, repeats, seed, device, progress=advance)
    except (AssertionError, RuntimeError, MemoryError) as error:  # torch without that device, or not enough memory
        raise CliError(f"cannot run on {device!r}: {' '.join(str(error).split())[:200]}") from error
    table = Table(title=f"Attention of one layer over a prompt, {dtype}, {rows[0]['threads']} threads")
    for column in ("tokens", "DKV ms", "SDPA ms", "SDPA / DKV", "exponent"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['context']:,}",
            f"{row['ms']:.1f}",
            f"{row['sdpa_ms']:.1f}",
            f"{row['ratio']:.2f}x",
            "-" if row["exponent"] is None else f"{row['exponent']:.2f}",
        )
    show.print(table)
    show.print("Selection included, default settings. Exponent: of the growth since a prompt a fourth as long.")
    _common.write_json(json_file, rows)
    if plot is not None:
        from dkv.benches import plots

        with _common.writing(plot):
            plots.times(rows, plot, f"Attention of one layer over a prompt, {dtype}")
