"""``dkv bench mlx``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from dkv.cli import _common
from dkv.cli._common import CliError

EXAMPLES = _common.examples(
    "dkv bench mlx",
    "dkv bench mlx --model mlx-community/Qwen2.5-1.5B-Instruct-4bit --contexts 4096,16384,65536 --json mlx.json",
    "dkv bench mlx --contexts 1024,4096,8192 --torch-model smollm2-135m --plot mlx.svg",
)


def mlx(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model of mlx-lm: known name (smollm2-135m), folder or hub id.")
    ] = "smollm2-135m",
    contexts: Annotated[str, typer.Option(help="Text lengths in tokens, with commas.")] = "1024,4096",
    trials: Annotated[int, typer.Option(help="Passcodes per text length.")] = 1,
    preset: Annotated[str, typer.Option(help=_common.PRESET_HELP)] = "default",
    profile: _common.ProfileOption = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a compressed block.")] = None,
    window: Annotated[int | None, typer.Option(help="Newest tokens that stay exact, at least.")] = None,
    sink_tokens: Annotated[int | None, typer.Option(help="First tokens that stay exact.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Blocks that a decode step attends.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens per prefill step.")] = 2048,
    decode_tokens: Annotated[int, typer.Option(help="Decode steps that are timed, the answer among them.")] = 32,
    dtype: Annotated[
        str | None, typer.Option(help="Of the activations and the cache; the model's own if unset.")
    ] = None,
    torch_model: Annotated[
        str | None, typer.Option(help="Also measure this model in PyTorch, dense and DKV: known name or hub id.")
    ] = None,
    torch_dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float16",
    torch_device: Annotated[str, typer.Option(help="cpu, cuda, mps; the GPU where there is one if auto.")] = "auto",
    seed: _common.SeedOption = 0,
    warm_up: Annotated[bool, typer.Option(help="Read a short text first.")] = True,
    json_file: _common.JsonOption = None,
    plot: _common.PlotOption = None,
) -> None:
    """Measure DKV beside dense mlx-lm with the same weights: prefill, decode, bytes, recall.

    --plot draws times and bytes against the context.
    """
    lengths = _common.integers("--contexts", contexts)
    _common.at_least("--trials", trials, 1)
    _common.at_least("--chunk", chunk, 1)
    _common.at_least("--decode-tokens", decode_tokens, 2)
    _common.check_dtype(torch_dtype)
    if dtype is not None:
        _common.check_dtype(dtype)
    given = {"block_size": block_size, "window": window, "sink_tokens": sink_tokens, "top_k": top_k}
    config = _common.make_config(preset, profile, model, **given)
    show = _common.check_outputs(json_file, plot)
    from dkv.benches import mlx_model

    mlx_model.require()
    import mlx.core as mx

    from dkv.benches import mlx_lm as measure
    from dkv.benches import needle
    from dkv.integrations.mlx_lm import make_prompt_cache

    with _common.status(f"Loading {model}"):
        language_model, tokenizer, settings = mlx_model.load(model)
    _common.quiet_libraries()
    if dtype is not None:
        language_model.set_dtype(getattr(mx, dtype))
    try:
        make_prompt_cache(language_model, config)
    except ValueError as error:
        raise CliError(f"these settings do not fit {model}: {error}") from error
    extra = len(needle.encode(tokenizer, needle.QUESTION)) + decode_tokens
    limit = mlx_model.max_context(settings)
    for length in lengths:
        if limit is not None and length + extra > limit:
            raise CliError(
                f"{length} tokens and {extra} for what follows are more than the model's context of {limit} tokens"
            )
        try:
            needle.bury(tokenizer, length, seed)
        except ValueError as error:
            raise CliError(f"--contexts: {error}") from error
    beside = None if torch_model is None else _torch_model(torch_model, torch_dtype, torch_device)
    total = 2 * warm_up + len(lengths) * trials * (2 if beside is None else 3)
    with _common.progress(total) as advance:
        rows = measure.run(
            language_model,
            tokenizer,
            lengths,
            config,
            trials,
            seed,
            chunk,
            decode_tokens,
            beside,
            warm_up,
            advance=advance,
        )
    show.print(_table(rows, f"{model} in mlx-lm, {measure.where()}"))
    show.print(
        f"Asked after the text was read; DKV compresses while it reads and keeps the first {config.sink_tokens} and "
        f"the newest {config.window} to {config.window + config.block_size - 1} tokens exact. Peak memory is MLX's, "
        "model included; in torch rows that of the GPU, or of the process on a CPU."
    )
    _common.write_json(
        json_file,
        {
            "model": model,
            "where": measure.where(),
            "dtype": dtype,
            "torch_model": torch_model,
            "torch_dtype": torch_dtype if torch_model else None,
            "chunk": chunk,
            "decode_tokens": decode_tokens,
            "seed": seed,
            "config": _common.described(config, profile or model),
            "rows": rows,
        },
    )
    if plot is not None:
        from dkv.benches import plots

        with _common.writing(plot):
            plots.engines(rows, plot, f"{model}, {measure.where()}")


def _torch_model(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    from dkv.models import require

    torch = require("torch")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return _common.load_model(name, dtype, device)


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    table.add_column("context", justify="right")
    table.add_column("engine", no_wrap=True)
    for column in ("prefill s", "tokens / s", "KV MB", "dense / KV", "peak MB", "recall"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['context']:,}",
            row["engine"],
            f"{row['prefill_seconds']:.1f}",
            f"{row['decode_tokens_per_second']:.1f}",
            f"{row['kv_bytes'] / 1e6:,.1f}",
            f"{row['ratio']:.2f}",
            f"{row['peak_bytes'] / 1e6:,.0f}",
            f"{row['right']} / {row['trials']}",
        )
    return table
