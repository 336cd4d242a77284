"""``dkv profile``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dkv.benches import results
from dkv.cli import _common
from dkv.cli._common import CliError
from dkv.profile import HeadProfile

TOP = 10  # heads that the table shows
EXAMPLES = _common.examples(
    "dkv profile smollm2-135m -o profile.json",
    "dkv profile ./my-model -o my-model.json --text my-own-text.txt --passages 4",
    "dkv generate --model ./my-model --preset balanced --profile my-model.json --prompt-file book.txt",
)


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
    json_file: _common.JsonOption = None,
) -> None:
    """Measure which kv heads go back to earlier copies of a passage, and write it to a file."""
    for name, value in (("passages", passages), ("passage-tokens", passage_tokens), ("repeat-tokens", repeat_tokens)):
        _common.at_least(f"--{name}", value, 1)
    far = _common.integers("--distances", distances)
    given = None if text is None else _common.read_text(text)
    show = _common.check_outputs(json_file)
    _common.check_writable(output)
    language_model, tokenizer = _common.load_model(model, dtype, device)
    from dkv import profiling

    start = time.perf_counter()
    try:
        with _common.progress(_steps(language_model, passages, len(far))) as advance:
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
                progress=advance,
            )
    except ValueError as error:
        raise CliError(str(error)) from error
    seconds = time.perf_counter() - start
    with _common.writing(output):
        made.save(output)
    show.print(_table(made))
    count = made.num_layers * made.num_kv_heads
    show.print(f"{output}: scores of {count} kv heads ({made.num_layers} layers), measured in {seconds:.1f} s.")
    if json_file is not None:
        with _common.writing(json_file):
            results.dump(json_file, {"file": str(output), "seconds": round(seconds, 2), "profile": made.to_dict()})


def _steps(model: Any, passages: int, distances: int) -> int:
    """How often measuring tells what it does next."""
    from dkv import sensitivity
    from dkv.integrations.transformers import FULL_ATTENTION, layer_kinds

    kinds, _ = layer_kinds(model.config)
    priced = 1 + 1 + len(sensitivity.COPIED_FROM) + kinds.count(FULL_ATTENTION)
    return passages * (distances + priced)


def _table(made: HeadProfile) -> Table:
    table = Table(title=f"Heads that go back to an earlier copy ({made.model})")
    for column in ("layer", "kv head", "score"):
        table.add_column(column, justify="right")
    for layer, head in made.ranked_heads()[:TOP]:
        table.add_row(str(layer), str(head), f"{made.scores[layer][head]:.3f}")
    return table
