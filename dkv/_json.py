"""JSON that is read with nothing said twice, and written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

from dkv._paths import replaced


def read_json(data: bytes) -> dict[str, Any]:
    """A mapping of names.

    Raises
    ------
    ValueError
        When the bytes are no JSON of UTF-8 text, no mapping, nested too deeply, or name something twice.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is no mapping of names")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice in it")
    return found


def digest(value: Any, payload: Iterable[Any] = ()) -> str:
    """SHA-256 of what JSON says, however it is spaced and ordered, and of the bytes that follow."""
    try:
        found = hashlib.sha256(json.dumps(value, sort_keys=True).encode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    for chunk in payload:
        found.update(chunk)
    return found.hexdigest()


def write_json(path: str | os.PathLike[str], value: Any, indent: int = 2) -> None:
    """Write a value through a temporary file and an atomic rename; straight to what is no regular file, as a pipe."""
    text = json.dumps(value, indent=indent) + "\n"
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    with replaced(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
