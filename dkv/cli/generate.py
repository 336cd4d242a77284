"""``dkv generate``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dkv.cli import _common
from dkv.cli._common import CliError, err, megabytes, out

EXAMPLES = _common.examples(
    'dkv generate --prompt "Once upon a time"',
    "dkv generate --prompt-file book.txt --max-new-tokens 200 --window 512",
    "dkv generate --prompt-file book.txt --preset small --json made.json",
    'dkv generate --prompt "Why is the sky blue?" --chat --dense',
)


def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file that holds the text.")] = None,
    model: _common.ModelOption = "smollm2-135m",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Put the text into the model's chat template.")] = False,
    dense: Annotated[bool, typer.Option("--dense", help="Use the ordinary cache instead of DKV.")] = False,
    dtype: _common.DtypeOption = "float32",
    device: _common.DeviceOption = "cpu",
    preset: Annotated[str, typer.Option(help=_common.PRESET_HELP)] = "default",
    profile: _common.ProfileOption = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the low-rank part, 0 to 128.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a compressed block, 2 to 256.")] = None,
    num_residuals: Annotated[int | None, typer.Option(help="Rows of a block kept beside the low-rank part.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Compressed blocks that a step attends.")] = None,
    window: Annotated[int | None, typer.Option(help="Newest tokens that stay exact, at least.")] = None,
    json_file: _common.JsonOption = None,
) -> None:
    """Continue a text greedily, streaming it; the cache's size goes to stderr. Unset settings are the preset's."""
    text = _prompt(prompt, prompt_file)
    _common.at_least("--max-new-tokens", max_new_tokens, 1)
    config = _common.make_config(
        preset,
        profile,
        model,
        rank=rank,
        block_size=block_size,
        num_residuals=num_residuals,
        top_k=top_k,
        window=window,
    )
    show = _common.check_outputs(json_file)
    language_model, tokenizer = _common.load_model(model, dtype, device)
    _common.check_profile(config, language_model)
    ids = _encode(tokenizer, text, chat)
    if not ids:
        raise CliError("the prompt is empty")
    _common.check_context(language_model, len(ids), max_new_tokens)
    from dkv.benches import needle

    if dense:
        cache = needle.dense_cache(language_model)
    else:
        from dkv.benches.recall import following_dtype
        from dkv.integrations.transformers import DKVCache, attach

        config = following_dtype(config, language_model)
        attach(language_model, config)
        cache = DKVCache(language_model, config)
    with _common.progress(len(ids)) as advance:
        start = time.perf_counter()
        if len(ids) > 1:
            needle.feed(language_model, ids[:-1], cache, advance=lambda count: advance("Reading the prompt", count))
        prefill_seconds = time.perf_counter() - start
    written, made, seconds = _stream(language_model, tokenizer, cache, ids[-1:], max_new_tokens, show is not out)
    nbytes, dense_nbytes = (needle.dense_cache_nbytes(cache),) * 2 if dense else (cache.nbytes, cache.dense_nbytes)
    line = f"{len(ids) + made:,} tokens, {made / seconds:.1f} tokens/s, KV cache {megabytes(nbytes)}"
    if not dense:
        line += f" where dense takes {megabytes(dense_nbytes)} ({dense_nbytes / nbytes:.2f}x)"
    err.print(line)
    _common.write_json(
        json_file,
        {
            "model": model,
            "dtype": dtype,
            "prompt_tokens": len(ids),
            "new_tokens": made,
            "text": written,
            "prefill_seconds": round(prefill_seconds, 3),
            "decode_tokens_per_second": round(made / seconds, 2),
            "kv_bytes": nbytes,
            "dense_kv_bytes": dense_nbytes,
            "config": None if dense else _common.described(config, profile or model),
        },
    )


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise CliError("give either --prompt or --prompt-file")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    return _common.read_text(prompt_file)


def _encode(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(text, verbose=False).input_ids)
    if not getattr(tokenizer, "chat_template", None):
        raise CliError("this model's tokenizer has no chat template; leave --chat out")
    messages = [{"role": "user", "content": text}]
    filled = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(filled, add_special_tokens=False, verbose=False).input_ids)


def _stream(
    model: Any, tokenizer: Any, cache: Any, last: list[int], max_new_tokens: int, to_stderr: bool
) -> tuple[str, int, float]:
    """Write the continuation as it comes; the text, how many tokens, and in how many seconds."""
    import torch

    from dkv.benches import needle

    stop = model.generation_config.eos_token_id
    stops = set(stop) if isinstance(stop, list) else {stop}
    made: list[int] = []
    shown = ""
    start = time.perf_counter()
    for _ in range(max_new_tokens):
        logits = needle.step(model, torch.tensor([last], device=model.device), cache)
        last = [int(logits[0].argmax())]
        made += last
        if last[0] in stops:
            break
        text = tokenizer.decode(made, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half of a character
            typer.echo(text[len(shown) :], nl=False, err=to_stderr)
            shown = text
    typer.echo(err=to_stderr)
    return shown, len(made), time.perf_counter() - start
