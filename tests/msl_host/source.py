"""Metal source as text: where it comes from, its `threadgroup` variables, what the host refuses, and mutants of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import MSLCompileError
from .signature import ATTRIBUTES, Signature

MARK = re.compile(r'^[ \t]*#[ \t]*line[ \t]+(\d+)(?:[ \t]+"([^"\n]*)")?', re.M)
HIDDEN = re.compile(
    rf'{MARK.pattern}|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.M | re.S
)
BARRIER = re.compile(r"\b(?:threadgroup|simdgroup)_barrier\s*\(")
STATIC = re.compile(r"\bstatic\s+(?!const\b|constexpr\b|constant\b|inline\b|METAL_FUNC\b)[\w:<>]+\s+\w+\s*[=;\[]")
GUARD = re.compile(r"\bif\s*(?:constexpr\s*)?\(")


def code(text: str) -> str:
    """The text with comments and strings, but for those of ``#line``, blanked out: of the same length and lines."""
    return HIDDEN.sub(lambda match: match[0] if match[1] else re.sub(r"[^\n]", " ", match[0]), text)


def located(text: str, file: str, line: int = 1) -> str:
    """The text marked with where it comes from, so that errors here and on Metal name that file and line."""
    return f'#line {line} "{file}"\n{text}'


def place(text: str, position: int, file: str) -> str:
    """``file:line`` of a position in a text, as its own ``#line`` marks say or else counted in ``file``."""
    line, start = 1, 0
    for mark in MARK.finditer(text, 0, position):
        line, file, start = int(mark.group(1)), mark.group(2) or file, text.find("\n", mark.end()) + 1
    return f"{file}:{line + text.count(chr(10), start, position)}"


def closing(text: str, opening: int) -> int:
    """Position of the parenthesis that closes the one at ``opening``."""
    depth = 0
    for position in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if not depth:
            return position
    raise MSLCompileError(f"line {text.count(chr(10), 0, opening) + 1}: error: a parenthesis that is never closed")


# ---- from Metal to C++


def find_variables(clean: str, file: str = "") -> Iterator[tuple[int, int, list[str]]]:
    """Start and end of every ``threadgroup T x[..], y;`` with its declarators, ["T x[..]", " y"].

    Elsewhere ``threadgroup`` is the address space of a pointer or a reference, and left to a macro.
    """
    for match in re.finditer(r"\bthreadgroup\s", clean):
        depth, square, position, parts = 0, 0, match.start(), [match.end()]
        for position in range(match.end(), len(clean)):
            letter = clean[position]
            square += {"[": 1, "]": -1}.get(letter, 0)
            depth += 0 if square else {"<": 1, ">": -1}.get(letter, 0)
            if square or depth > 0 or letter == "]":
                continue
            if letter in ",;":
                parts.append(position)
            if letter in ";*&(){=" or depth < 0:
                break
        if clean[position] == "=":
            raise MSLCompileError(f"{place(clean, position, file)}: error: threadgroup variables have no initial value")
        if clean[position] == ";":
            yield match.start(), position + 1, [clean[i:j].lstrip(",") for i, j in zip(parts, parts[1:])]


def place_threadgroup_variables(text: str, file: str) -> str:
    """Every threadgroup variable as a reference into the threadgroup's memory; lines stay where they are."""
    result, done = [], 0
    for start, end, declarators in find_variables(code(text), file):
        first = declarators[0].split("[")[0].rstrip()
        type_ = re.sub(r"\w+$", "", first)
        declarators[0] = declarators[0][len(type_) :]
        result.append(text[done:start])
        for declarator in declarators:
            name, *size = declarator.strip().split("[", 1)
            kind, variable, name = f"msl_type_{name.strip()}", f"msl_variable_{name.strip()}", name.strip()
            described = f'{{"{name}", sizeof({kind}), alignof({kind}), msl::grain<{kind}>}}'
            new = f"typedef {type_} {kind}{''.join('[' + s for s in size)}; "
            new += f"static const msl::Variable {variable} = {described}; "
            new += f"{kind}& {name} = msl::threadgroup_variable<{kind}>(&{variable}); "
            result.append(" ".join(new.split()))
        result.append("\n" * text.count("\n", start, end))
        done = end
    return "".join(result) + text[done:]


def find_functions(clean: str) -> Iterator[tuple[str, int, int]]:
    """Name of every function that is defined, and where its body begins and ends."""
    for match in re.finditer(r"\b(?!(?:if|for|while|switch)\b)([A-Za-z_]\w*)\s*\(", clean):
        begin = re.compile(r"\s*(?:thread|const)?\s*\{").match(clean, closing(clean, match.end() - 1) + 1)
        if begin:
            end, depth = begin.end(), 1
            while depth and end < len(clean):
                depth += {"{": 1, "}": -1}.get(clean[end], 0)
                end += 1
            yield match[1], begin.end(), end


def refuse(text: str, file: str) -> None:
    """Raise for what C++ takes and Metal does not: variables that outlive a call, functions that call themselves."""
    clean = code(text)
    for match in STATIC.finditer(clean):
        where = place(text, match.start(), file)
        raise MSLCompileError(f"{where}: error: a static variable; Metal has none that change")
    functions = list(find_functions(clean))
    overloaded = Counter(name for name, _, _ in functions)
    for name, begin, end in functions:
        again = re.compile(rf"(?<![.\w:]){name}\s*\(").search(clean, begin, end)
        if again and overloaded[name] == 1:
            where = place(text, again.start(), file)
            raise MSLCompileError(f"{where}: error: {name} calls itself; Metal has no recursion")


def to_cpp(signature: Signature, name: str) -> str:
    """C++ that g++ compiles to the function ``msl_entry(buffers, thread)``."""
    header, source = f"{name}.header.metal", f"{name}.metal"
    refuse(signature.header, header)
    refuse(signature.source, source)
    arguments = []
    for index, binding in enumerate(signature.bindings):
        const = "" if binding.kind == "output" else "const "
        arguments.append(f"{'*' if binding.reference else ''}({const}{binding.type}*)b[{index}]")
    arguments += [ATTRIBUTES[key][1] for key in signature.attributes]
    return f"""#line 1 "{header}"
{place_threadgroup_variables(signature.header, header)}
#line 1 "signature.metal"
{signature.opening}
#line 1 "{source}"
{place_threadgroup_variables(signature.source, source)}
}}
#line 1 "launcher"
static inline uint3 as_uint3(msl::Size s) {{ return uint3(s.x, s.y, s.z); }}
static inline uint volume(msl::Size s) {{ return s.x * s.y * s.z; }}
extern "C" MSL_UNWATCHED void msl_entry(void* const* b, const msl::Thread* t) {{
  {signature.name}{signature.template}({", ".join(arguments)});
}}
"""


# ---- mutants


@dataclass(frozen=True)
class Mutant:
    """A source in which one thing was broken: ``what`` it was, and where."""

    line: int
    what: str
    source: str


def without_barriers(source: str) -> Iterator[Mutant]:
    """The source without its first barrier, without its second, and so on."""
    clean = code(source)
    for match in BARRIER.finditer(clean):
        end = closing(clean, match.end() - 1) + 1
        yield mutate(source, match.start(), end, "(void)0")


def without_guards(source: str, pattern: str = "") -> Iterator[Mutant]:
    """The source with one ``if`` always taken, for each whose condition matches the regular expression ``pattern``."""
    clean = code(source)
    for match in GUARD.finditer(clean):
        start, end = match.end(), closing(clean, match.end() - 1)
        if re.search(pattern, clean[start:end]):
            yield mutate(source, start, end, "true")


def mutate(source: str, start: int, end: int, replacement: str) -> Mutant:
    what = " ".join(source[start:end].split())
    replacement += "\n" * source.count("\n", start, end)
    return Mutant(source.count("\n", 0, start) + 1, what, source[:start] + replacement + source[end:])
