"""``dkv fidelity``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dkv.benches import results
from dkv.cli import _common
from dkv.cli._common import CliError
from dkv.config import DKVConfig

NEEDED = ("name", "kind", "ratio", "whole_cache_ratio", "std_kl", "std_top1", "copy_kl", "copy_top1", "recall", "n")
PREFILL_NOTE = (
    "Visited: key blocks attended, of those that a dense prefill attends. KL in nats, of continuations that attend the "
    "cache densely; end: of the same read block-sparsely, as the end of the prompt. Recall asks for a passcode of the "
    "prompt, counted where the dense cache knows it."
)
EXAMPLES = _common.examples(
    "dkv fidelity --json fidelity.json --plot fidelity.svg",
    "dkv fidelity --tokens 2048 --offsets 0,20000 --trials 0",
    "dkv fidelity --text my-own-text.txt --offsets 0 --variants default,small --no-peers",
    "dkv fidelity --routing --trials 0 --no-peers",
    "dkv fidelity --prefill --json prefill.json",
)


def fidelity(
    model: _common.ModelOption = "smollm2-135m",
    tokens: Annotated[int, typer.Option(help="Tokens before a continuation; a multiple of 256.")] = 7424,
    offsets: Annotated[
        str, typer.Option(help="Tokens of the text at which a measured text begins, with commas.")
    ] = "0,20000,40000,60000",
    trials: Annotated[int, typer.Option(help="Passcodes; 0 leaves recall out.")] = 5,
    dtype: _common.DtypeOption = "float32",
    device: _common.DeviceOption = "cpu",
    text: Annotated[Path | None, typer.Option(help="Measure on this UTF-8 file instead of built-in prose.")] = None,
    variants: Annotated[
        str | None, typer.Option(help="Names of DKV variants, with commas; all of them if unset.")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure other quantisers too.")] = True,
    add: Annotated[
        Path | None, typer.Option(help="Show the rows of this JSON file too, as kvpress_peer writes it.")
    ] = None,
    profile: _common.ProfileOption = None,
    routing: Annotated[bool, typer.Option("--routing", help="Compare routers instead.")] = False,
    top_k: Annotated[int, typer.Option(help="Blocks of each head, with --routing.")] = 8,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Compare block-sparse prefill with dense prefill instead.")
    ] = False,
    seed: _common.SeedOption = 0,
    json_file: _common.JsonOption = None,
    plot: _common.PlotOption = None,
) -> None:
    """Measure how far compressed caches are from the dense one: KL, top-1 and recall, beside peers and floors.

    --plot draws KL against ratio.
    """
    starts = _common.integers("--offsets", offsets, low=0)
    if len(set(starts)) < len(starts):
        raise CliError(f"--offsets must differ, got {offsets!r}")
    _common.at_least("--trials", trials, 0)
    show = _common.check_outputs(json_file, plot)
    _common.at_least("--top-k", top_k, 1)
    if prefill and (routing or add or plot):
        raise CliError("--prefill has a table of its own: leave --routing, --add and --plot out")
    more = _read_rows(add, tokens, starts)
    content = None if text is None else _common.read_text(text)
    language_model, tokenizer = _common.load_model(model, dtype, device)
    from dkv.benches import fidelity as bench
    from dkv.benches import needle, plots, prefill_fidelity
    from dkv.benches import peers as other

    _common.check_context(language_model, tokens, max(bench.LENGTH, needle.longest(tokenizer)))
    scores = _common.find_profile(model, profile)
    if scores is not None:
        _common.check_profile(DKVConfig(profile=scores), language_model)
    if routing and scores is None:
        raise CliError("--routing needs the model's profile: --profile FILE, made by `dkv profile MODEL -o FILE`")
    if prefill:
        chosen = prefill_fidelity.default_variants(scores)
    elif routing and scores is not None:
        chosen = bench.routed_variants(scores, top_k)
    else:
        chosen = bench.default_variants(scores)
    if variants is not None:
        names = [name.strip() for name in variants.split(",")]
        unknown = [name for name in names if name not in chosen]
        if unknown:
            raise CliError(f"--variants: unknown {unknown[0]!r}; known are {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in names}
    try:
        bench.passages(tokenizer, needle.prose() if content is None else content, tokens, starts)
    except ValueError as error:
        raise CliError(f"cannot measure this: {error}") from error
    if prefill:
        with _common.progress((len(starts) + trials) * (1 + len(chosen))) as advance:
            rows = prefill_fidelity.run(
                language_model, tokenizer, tokens, starts, trials, seed, content, chosen, advance=advance
            )
        show.print(
            _prefill_table(rows, f"Block-sparse prefill against dense prefill ({model}, {dtype}, {tokens:,} tokens)")
        )
        show.print(PREFILL_NOTE)
        _common.write_json(json_file, rows)
        return
    found, skipped = other.available(language_model) if peers else ([], [])
    subjects = len(other.floors()) + len(chosen) + len(found)
    with _common.progress((len(starts) + trials) * (2 + subjects)) as advance:
        rows = bench.run(
            language_model,
            tokenizer,
            tokens,
            starts,
            trials,
            seed,
            content,
            chosen,
            found,
            advance=advance,
        )
    rows += more
    show.print(_table(rows, f"Compressed cache against the dense one ({model}, {dtype}, {tokens:,} tokens)"))
    texts = f"Mean of {len(starts)} texts, ± their standard deviation" if len(starts) > 1 else "One text"
    show.print(
        f"{texts}. The first {bench.SINK} and the last {bench.WINDOW} "
        "tokens stay exact. KL in nats. Bytes are those of a 16-bit cache. Recall asks for a passcode after "
        "compression, counted where the dense cache knows it."
    )
    for line in skipped if not more else skipped[:-1]:  # the last one says how to get rows to add
        show.print(f"Not measured: {line}")
    _common.write_json(json_file, rows)
    if plot is not None:
        with _common.writing(plot):
            plots.fidelity(rows, plot)


def _prefill_table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for column in ("limit", "visited", "std KL", "top-1", "copy KL", "top-1", "recall", "end std KL", "end copy KL"):
        table.add_column(column, justify="left" if column == "limit" else "right", min_width=len(column))
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['visited']:.1%}",
            _with_spread(row, "std_kl"),
            f"{row['std_top1']:.3f}",
            _with_spread(row, "copy_kl"),
            f"{row['copy_top1']:.3f}",
            "-" if row["recall"] is None else f"{round(row['recall'] * row['n'])} of {row['n']}",
            _with_spread(row, "end_std_kl"),
            _with_spread(row, "end_copy_kl"),
        )
    return table


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for column in ("variant", "ratio", "whole", "std KL", "top-1", "copy KL", "top-1", "recall"):
        table.add_column(column, justify="left" if column == "variant" else "right", min_width=len(column))
    for index, row in enumerate(rows):
        table.add_row(
            row["name"],
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}x",
            f"{row['whole_cache_ratio']:.2f}x",
            _with_spread(row, "std_kl"),
            f"{row['std_top1']:.3f}",
            _with_spread(row, "copy_kl"),
            f"{row['copy_top1']:.3f}",
            "-" if row["recall"] is None else f"{round(row['recall'] * row['n'])} of {row['n']}",
            end_section=index + 1 < len(rows) and rows[index + 1]["kind"] != row["kind"],
        )
    return table


def _with_spread(row: dict[str, Any], metric: str) -> str:
    spread = row.get(f"{metric}_spread")
    return f"{row[metric]:.3g}" + ("" if spread is None else f" ±{spread:.2g}")


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not set(NEEDED) <= set(row):
        return False
    unset = {name for name in ("ratio", "recall", "n") if row[name] is None}
    kinds = {name: (str,) if name in ("name", "kind") else (int, float) for name in NEEDED if name not in unset}
    return all(type(row[name]) in kind for name, kind in kinds.items())


def _read_rows(path: Path | None, tokens: int, offsets: list[int]) -> list[dict[str, Any]]:
    """Rows that were measured before on the same texts."""
    if path is None:
        return []
    try:
        rows = results.read_rows(path)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CliError(f"{path} is not JSON") from error
    except ValueError as error:
        raise CliError(f"{path} does not hold rows of dkv fidelity") from error
    if not all(map(_is_row, rows)):
        raise CliError(f"{path} does not hold rows of dkv fidelity")
    for row in rows:
        if (row.get("tokens"), row.get("offsets")) != (tokens, offsets):
            found = f"{row.get('tokens')} tokens at offsets {row.get('offsets')}"
            raise CliError(f"{path}: {row['name']!r} was measured with {found}, not {tokens} at {offsets}")
    return rows
