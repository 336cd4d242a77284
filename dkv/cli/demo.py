"""``dkv demo``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dkv.cli import FAILED, _common
from dkv.cli._common import CliError, megabytes

if TYPE_CHECKING:
    from dkv.benches.demo import Row

EXAMPLES = _common.examples(
    "dkv demo",
    "dkv demo --tokens 8000 --top-k 8 --seed 3",
    "dkv demo --num-residuals 64 --json demo.json",
    "dkv demo --model ./my-model --dtype float32 --no-route",
)


def demo(
    model: _common.ModelOption = "smollm2-135m",
    tokens: Annotated[int, typer.Option(help="Length of the text.")] = 4000,
    dtype: _common.DtypeOption = "bfloat16",
    device: _common.DeviceOption = "cpu",
    seed: _common.SeedOption = 0,
    rank: _common.RankOption = 32,
    block_size: _common.BlockSizeOption = 256,
    num_residuals: _common.ResidualsOption = None,
    top_k: Annotated[int, typer.Option(help="Blocks that a decode step of the routed row attends.")] = 4,
    window: Annotated[int, typer.Option(help="Newest tokens that stay exact, at least.")] = 256,
    route: Annotated[bool, typer.Option(help="Also run with routing.")] = True,
    json_file: _common.JsonOption = None,
) -> None:
    """Bury a passcode in a long text, compress the cache, then ask for it.

    Exit code 1 when the dense cache knew the passcode and a compressed one did not.
    """
    config = _common.make_config(
        rank=rank, block_size=block_size, num_residuals=num_residuals, top_k=top_k, window=window
    )
    _common.at_least("--tokens", tokens, 1)
    show = _common.check_outputs(json_file)
    language_model, tokenizer = _common.load_model(model, dtype, device)
    from dkv.benches import demo as bench
    from dkv.benches import needle

    _common.check_context(language_model, tokens, needle.longest(tokenizer))
    try:
        hay = needle.bury(tokenizer, tokens, seed, first=config.sink_tokens, last=window + block_size - 1)
    except ValueError as error:
        raise CliError(f"--tokens: {error}") from error
    show.print(
        f"{model}: {len(hay.ids):,} tokens of prose, the passcode {hay.code} buried at token {hay.position:,}. "
        "Each cache reads it all; the DKV cache is compressed before the question comes."
    )
    with _common.progress(2 * len(hay.ids)) as advance:

        def prefilled(label: str, count: int) -> None:
            advance(f"Prefill, {label}", count)

        rows = bench.run(language_model, tokenizer, hay, config, top_k if route else None, advance=prefilled)
    show.print(_table(rows))
    show.print(
        f"Peak memory: {rows[0].peak_meaning}. DKV keeps the first {config.sink_tokens} and the newest {window} to "
        f"{window + block_size - 1} tokens exact; both DKV columns ask copies of one prefilled cache."
    )
    show.print(bench.sentence(rows, hay.code))
    _common.write_json(
        json_file,
        {
            "model": model,
            "tokens": len(hay.ids),
            "dtype": dtype,
            "code": hay.code,
            "position": hay.position,
            "config": config.to_dict(),
            "rows": [dataclasses.asdict(row) for row in rows],
        },
    )
    if bench.forgot(rows):
        raise typer.Exit(FAILED)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="Asked after compression")
    table.add_column("")
    for row in rows:
        table.add_column(row.variant, justify="right", overflow="fold")
    dense = rows[0]

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    lines = {
        "answer": [row.answer[:17] for row in rows],
        "right?": ["right" if row.right else "WRONG" for row in rows],
        "KV cache": [megabytes(row.kv_bytes) for row in rows],
        "ratio": ["1" if row is dense else ratio(row.ratio) for row in rows],
        "ratio, blocks": [ratio(row.compressed_ratio) for row in rows],
        "peak memory": [megabytes(row.peak_bytes) for row in rows],
        "prefill": [f"{row.prefill_seconds:.1f} s" for row in rows],
        "decode": [f"{row.decode_tokens_per_second:.1f} tokens/s" for row in rows],
    }
    for label, cells in lines.items():
        table.add_row(label, *cells)
    return table
