"""clang as a second opinion: address spaces are types to it, and it follows variables that are never set."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from .build import HERE
from .errors import MSLError
from .signature import Signature
from .source import code, find_variables

VECTOR = re.compile(r"\b((?:float|half|int|uint|short|ushort|char|uchar|long|ulong)[234])(\s*\()")
FLAGS = [
    "-std=c++17",
    "-fsyntax-only",
    "-Wno-everything",
    "-Werror=uninitialized",
    "-Werror=sometimes-uninitialized",
    "-Werror=return-type",
    "-Werror=infinite-recursion",
    "-ferror-limit=20",
    "-Xclang",
    "-cl-single-precision-constant",
]


def clang() -> str:
    return os.environ.get("MSL_HOST_CLANG", "clang++-19")


def lint_unavailable() -> str | None:
    """Why there is no lint, None where there is."""
    return None if shutil.which(clang()) else f"the lint needs {clang()}, which is not installed"


def to_clang(text: str) -> str:
    """Metal as clang's C++: threadgroup variables are static, vectors are made by a function."""
    edits = [(start, start, "static ") for start, _, _ in find_variables(code(text))]
    edits += [(match.start(1), match.end(1), f"msl_make<{match[1]}>") for match in VECTOR.finditer(code(text))]
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def lint_signature(name: str, signature: Signature) -> list[str]:
    """Errors as ``file:line: message``."""
    reason = lint_unavailable()
    if reason:
        raise MSLError(reason)
    text = (
        f'#line 1 "{name}.header.metal"\n{to_clang(signature.header)}\n#line 1 "signature.metal"\n{signature.opening}\n'
        f'#line 1 "{name}.metal"\n{to_clang(signature.source)}\n}}\n'
    )
    if signature.template:
        text += f'#line 1 "signature.metal"\nauto* instance = &{signature.name}{signature.template};\n'
    command = [clang(), *FLAGS, "-include", str(HERE / "metal" / "lint.h"), "-x", "c++", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    found = re.findall(r"^(.*?:\d+):\d+: (?:fatal )?error: (.*)$", result.stderr, re.M)
    if result.returncode and not found:
        raise MSLError(f"{clang()} failed: {result.stderr[:2000]}")
    return list(dict.fromkeys(f"{place}: {message}" for place, message in found))
