"""A document and questions to it as the model expects them, for the examples that ask."""

from __future__ import annotations

from typing import Any

PLAIN = {"system": "{}", "user": "\n\nQuestion: {}\nAnswer:", "assistant": "{}"}


def rendered(tokenizer: Any, messages: list[dict[str, str]], answering: bool = False) -> str:
    """Messages by the model's chat template, or as plain questions and answers where it has none.

    The document is the ``"system"`` message. ``answering`` opens the answer that the model is to write.
    """
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering)
    return "".join(PLAIN[message["role"]].format(message["content"]) for message in messages)


def opening(tokenizer: Any, document: str) -> list[int]:
    """Token ids of the document, before anything is asked."""
    text = rendered(tokenizer, [{"role": "system", "content": document}])
    return tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)


def asking(tokenizer: Any, question: str, earlier: list[tuple[str, str]] | None = None) -> list[int]:
    """Token ids of a question, from where the document or the last answer ends.

    ``earlier`` are the questions and answers before it.
    """
    messages = [{"role": "system", "content": "."}]  # what is said of the document does not depend on it
    shown = rendered(tokenizer, messages)
    for asked, answer in earlier or []:
        messages.append({"role": "user", "content": asked})
        shown = rendered(tokenizer, messages, answering=True) + answer
        messages.append({"role": "assistant", "content": answer})
    text = rendered(tokenizer, [*messages, {"role": "user", "content": question}], answering=True)
    if not text.startswith(shown):
        raise SystemExit("this model's chat template rewrites earlier turns: its cache cannot go on from them")
    return tokenizer.encode(text[len(shown) :], add_special_tokens=False)
