"""``dkv profile``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dkv.cli import _common
from dkv.cli._common import CliError, err, out
from dkv.profile import HeadProfile

TOP = 10  # heads that the table shows


def profile(
    model: Annotated[str, typer.Argument(help="Known name (smollm2-135m), folder, .gguf file or hub id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the profile goes.")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 file to measure on; the text that ships if unset.")] = None,
    passages: Annotated[int, typer.Option(help="Stretches of the text.")] = 2,
    passage_tokens: Annotated[int, typer.Option(help="Tokens of a stretch.")] = 1400,
    repeat_tokens: Annotated[int, typer.Option(help="Tokens of it that come again.")] = 200,
    distances: Annotated[
        str, typer.Option(help="How far before the end of a stretch they begin, in tokens, with commas.")
    ] = "300,700,1300",
    dtype: _common.DtypeOption = "float32",
    device: _common.DeviceOption = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure which kv heads go back to earlier copies of a passage, and write it to a file."""
    for name, value in (("passages", passages), ("passage-tokens", passage_tokens), ("repeat-tokens", repeat_tokens)):
        _common.at_least(f"--{name}", value, 1)
    far = _common.integers("--distances", distances)
    given = None if text is None else _common.read_text(text)
    _common.check_writable(output)
    language_model, tokenizer = _common.load_model(model, dtype, device)
    from dkv import profiling

    start = time.perf_counter()
    try:
        with err.status("Starting") as status:
            made = profiling.measure_profile(
                language_model,
                tokenizer,
                given,
                name=Path(model).resolve().name if Path(model).exists() else model,
                text_name=None if text is None else text.name,
                passages=passages,
                passage_tokens=passage_tokens,
                repeat_tokens=repeat_tokens,
                distances=far,
                progress=status.update,
            )
    except ValueError as error:
        raise CliError(str(error)) from error
    seconds = time.perf_counter() - start
    try:
        made.save(output)
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror}") from error
    if as_json:
        facts = {"file": str(output), "seconds": round(seconds, 2), "profile": made.to_dict()}
        typer.echo(json.dumps(facts, indent=2))
        return
    out.print(_table(made))
    count = made.num_layers * made.num_kv_heads
    out.print(f"{output}: scores of {count} kv heads ({made.num_layers} layers), measured in {seconds:.1f} s.")


def _table(made: HeadProfile) -> Table:
    table = Table(title=f"Heads that go back to an earlier copy ({made.model})")
    for column in ("layer", "kv head", "score"):
        table.add_column(column, justify="right")
    for layer, head in made.ranked_heads()[:TOP]:
        table.add_row(str(layer), str(head), f"{made.scores[layer][head]:.3f}")
    return table
