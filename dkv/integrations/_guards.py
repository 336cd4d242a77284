"""What hosts ask of a cache, checked once and before any of its layers changes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dkv._checks import whole_number


def tokens_to_drop(tokens_to_remove: Any) -> int:
    """How many tokens transformers' ``crop`` takes off: it is given 0 or a negative number, of any integer type."""
    count = whole_number("tokens_to_remove", tokens_to_remove)
    if count > 0:
        raise ValueError(f"tokens_to_remove must be 0 or negative, as in transformers, got {count}")
    return -count


def fit_prompt(cache: Any, inputs: Tensor | None, embeds: Tensor | None, mask: Tensor | None) -> None:
    """Make ``generate`` right for a prompt that the cache has seen to its end, whose last token it then drops again.

    transformers slices such a prompt by ``[:, -0:]`` and feeds all of it once more.

    Raises
    ------
    ValueError
        When the cache has seen more tokens than the prompt has, or cannot give the last one back.
    """
    prompt = inputs if embeds is None else embeds
    seen = cache.get_seq_length()
    if prompt is None or not seen:
        return
    length = prompt.shape[1]
    if embeds is None and mask is not None and mask.shape[1] != length:
        return  # only new tokens are given, with the mask of all
    if length < seen:
        raise ValueError(
            f"the prompt has {length} tokens, the cache has seen {seen}: give the whole text so far, "
            f"or the new tokens with the attention_mask of all, or crop or reset the cache"
        )
    if length == seen:
        try:
            cache.crop(-1)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"the cache has seen all of the prompt and cannot give its last token back: {error}"
            ) from error
