"""``dkv recall``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from dkv.cli import _common
from dkv.cli._common import CliError

EXAMPLES = _common.examples(
    "dkv recall",
    "dkv recall --contexts 2048,4096,7680 --trials 20 --preset small --alone --json recall.json",
    "dkv recall --depths 10 --trials 2 --plot recall.svg",
)


def recall(
    model: _common.ModelOption = "smollm2-135m",
    contexts: Annotated[str, typer.Option(help="Text lengths in tokens, with commas.")] = "1024,2048,4096",
    trials: Annotated[int, typer.Option(help="Passcodes per text length, and per depth with --depths.")] = 5,
    depths: Annotated[
        int, typer.Option(help="Bury at so many depths, evenly spread over what is compressed; 0: anywhere.")
    ] = 0,
    dtype: _common.DtypeOption = "bfloat16",
    device: _common.DeviceOption = "cpu",
    seed: _common.SeedOption = 0,
    preset: Annotated[str | None, typer.Option(help=f"One more row. {_common.PRESET_HELP}")] = None,
    profile: _common.ProfileOption = None,
    alone: Annotated[bool, typer.Option("--alone", help="Only dense and the preset: quicker.")] = False,
    json_file: _common.JsonOption = None,
    plot: _common.PlotOption = None,
) -> None:
    """Count how often a passcode survives compression: dense, the published settings, the default.

    --plot draws a heat map for each variant, text length by depth.
    """
    lengths = _common.integers("--contexts", contexts)
    _common.at_least("--trials", trials, 1)
    _common.at_least("--depths", depths, 0)
    if alone and preset is None:
        raise CliError("--alone needs --preset")
    if profile is not None and preset is None:
        raise CliError("--profile needs --preset, the settings that it serves")
    config = None if preset is None else _common.make_config(preset, profile, model)
    show = _common.check_outputs(json_file, plot)
    language_model, tokenizer = _common.load_model(model, dtype, device)
    if config is not None:
        _common.check_profile(config, language_model)
    from dkv.benches import needle
    from dkv.benches import recall as bench

    for length in lengths:
        _common.check_context(language_model, length, needle.longest(tokenizer))
        try:
            needle.bury(tokenizer, length, seed)
        except ValueError as error:
            raise CliError(f"--contexts: {error}") from error
    variants = {} if alone else bench.default_variants()
    if config is not None:
        variants[f"preset {preset}"] = config
    with _common.progress(len(lengths) * trials * max(depths, 1) * (2 + len(variants))) as advance:
        rows = bench.run(language_model, tokenizer, lengths, trials, seed, variants, depths, advance)
    table = Table(title=f"Passcode recalled, asked after compression ({model}, {dtype})")
    for column in ("context", "variant", "right", "ratio, compressed part", "ratio, whole cache"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        table.add_row(
            f"{row['context']:,}",
            row["variant"],
            f"{row['right']} of {row['trials']}",
            f"{row['ratio']:.2f}x",
            f"{row['whole_cache_ratio']:.2f}x",
        )
    show.print(table)
    show.print(f"The first 256 and the newest {bench.WINDOW} to {bench.WINDOW + 255} tokens stay exact.")
    _common.write_json(json_file, rows)
    if plot is not None:
        from dkv.benches import plots

        with _common.writing(plot):
            plots.recall(rows, plot, depths or plots.DEPTHS)
