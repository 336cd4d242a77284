"""Compile a launch for a target without a GPU, and read from the result what a GPU would run."""

from __future__ import annotations

import collections
import contextlib
import io
import re
import time
import warnings
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from bench.launches import Launch
from dkv.kernels.triton._launch import INTERPRETED, options_of

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx90a": 64 << 10, "gfx942": 64 << 10}
CONSUMER_SHARED = 99 << 10  # of GPUs such as RTX 3090 and 4090
MATRIX = {"cuda": r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b[\w.:]*", "hip": r"\bv_mfma_\w+"}
LOADS = {
    "cuda": r"\bld\.global[\w.:]*",
    "hip": r"\b(?:global|buffer|flat)_load_\w+",
}
WIDTHS = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}


class Specialised(NamedTuple):
    """A launch as the JIT tells launches apart: what has the same ``key`` runs the same code."""

    key: str
    source: ASTSource
    options: dict[str, Any]


def specialised(launch: Launch, target: GPUTarget) -> Specialised:
    """Signature, constants and attributes that the JIT would compile this launch with.

    Raises
    ------
    RuntimeError
        Where this process interprets kernels: Triton's language is then another.
    """
    if INTERPRETED:
        raise RuntimeError("kernels were loaded for the interpreter: compile them in a process of their own")
    kernel, backend = launch.kernel, make_backend(target)
    given = options_of(launch.options, target.backend == "hip")
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = binder(*launch.arguments, **given)
    packed = kernel._pack_args(backend, dict(given), bound, specialization, rest)
    options, signature, constants, attributes = packed
    source = ASTSource(kernel, signature, constants, attributes)
    warps = {name: given.get(name) for name in ("num_warps", "num_stages", "maxnreg")}
    return Specialised(f"{launch.name} {specialization} {warps}", source, options.__dict__)


def compiled(job: Specialised, target: str) -> dict[str, Any]:
    """Registers, spills, shared memory, instructions and address arithmetic of one kernel.

    ``failures`` names what must not be; it holds the compiler's message where there is no kernel.
    """
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True  # what ptxas says is not kept in the cache
    log, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(log), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = triton.compile(job.source, target=TARGETS[target], options=job.options)
    except Exception as error:  # whatever the compiler says is the finding
        return {"failures": [f"does not compile: {said(error)}"]}
    kind = TARGETS[target].backend
    code = made.asm["ptx" if kind == "cuda" else "amdgcn"]
    row = cuda_resources(log.getvalue()) if kind == "cuda" else hip_resources(code)
    row["seconds"] = round(time.perf_counter() - start, 2)
    row["shared"] = int(made.metadata.shared)
    row["dots"] = dots(made.asm["ttir"])
    row["matrix"] = instructions(code, MATRIX[kind])
    row["dots_without_matrix_unit"] = plain_dots(made.asm["ttgir"])
    row["tf32"] = tf32(made.asm["ttir"], code)
    row["loads"] = load_widths(code, kind)
    row["entry"] = has_entry(made.asm, kind, job.source.fn.fn.__name__)
    row["narrow_addresses"] = narrow_addresses(made.asm["ttir"])
    row["failures"] = failures(row, target)
    return row


def said(error: BaseException) -> str:
    """Where the compiler stopped and why, without the source that it quotes."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    quoted = next((index for index, line in enumerate(lines) if line.startswith("^")), None)
    where = f"{lines[0]} {lines[quoted - 1]}: " if quoted else ""
    inner = [line.strip() for line in str(root).splitlines() if line.strip()]
    return f"{type(error).__name__} {where}{inner[-1] if inner else ''}"[:300]


def failures(row: dict[str, Any], target: str) -> list[str]:
    found = []
    if row["spills"]:
        found.append(f"spills {row['spills']}")
    if row["shared"] > SHARED[target]:
        found.append(f"{row['shared']} bytes of shared memory, {target} has {SHARED[target]}")
    narrow = sum(count for dtype, count in row["dots"].items() if dtype not in ("f32", "f64"))
    if row["dots_without_matrix_unit"] or (narrow and not row["matrix"]):
        found.append(f"{row['dots_without_matrix_unit'] or narrow} dots without a matrix instruction")
    if row["tf32"]:
        found.append("tf32")
    if not row["entry"]:
        found.append("no entry of the kernel's name")
    if row["narrow_addresses"]:
        found.append(f"32-bit addresses: {'; '.join(row['narrow_addresses'][:3])}")
    return found


def cuda_resources(log: str) -> dict[str, Any]:
    """From what ``ptxas -v`` says."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas said nothing of registers: {log[:300]!r}")
    return {"registers": int(registers[1]), "stack": int(spills[1]), "spills": int(spills[2]) + int(spills[3])}


def hip_resources(code: str) -> dict[str, Any]:
    """From the metadata of the assembly. Spills count registers; scalar ones go to lanes of vector registers."""

    def value(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        if found is None:
            raise RuntimeError(f"the assembly does not say {name}")
        return int(found[1])

    names = {"registers": "vgpr_count", "scalar_registers": "sgpr_count", "stack": "private_segment_fixed_size"}
    row = {name: value(field) for name, field in names.items()}
    accumulators = re.search(r"\.agpr_count:\s+(\d+)", code)
    row["accumulators"] = int(accumulators[1]) if accumulators else 0
    row["scalar_spills"] = value("sgpr_spill_count")
    row["spills"] = value("vgpr_spill_count")
    return row


def instructions(code: str, pattern: str) -> dict[str, int]:
    return dict(collections.Counter(found.group(0) for found in re.finditer(pattern, code)))


def dots(ttir: str) -> dict[str, int]:
    """Dots by the element type of their left operand."""
    return dict(collections.Counter(re.findall(r"tt\.dot .*?: tensor<(?:\d+x)+([a-z]\w*?)>", ttir)))


def has_entry(asm: dict[str, Any], kind: str, name: str) -> bool:
    """Whether the artefact is what a driver loads, PTX or an ELF file, and has the kernel's symbol."""
    if kind == "cuda":
        return re.search(rf"\.visible \.entry {name}\b", asm["ptx"]) is not None
    return bool(asm["hsaco"][:4] == b"\x7fELF" and name.encode() in asm["hsaco"])


def tf32(ttir: str, code: str) -> bool:
    """Whether float32 is multiplied in fewer bits. The dot of 16-bit numbers carries the attribute for nothing."""
    asked = re.findall(r"tt\.dot ([^:]*): tensor<(?:\d+x)+f32>", ttir)
    return any("tf32" in attributes for attributes in asked) or re.search(r"tf32|_xf32", code) is not None


def plain_dots(ttgir: str) -> int:
    """Dots of 16-bit operands that were laid out for multiply-add, not for the matrix unit."""
    blocked = set(re.findall(r"(#\w+) = #ttg\.blocked<", ttgir))
    found = re.findall(r"tt\.dot .*?: tensor<(?:\d+x)+(\w+), .*? -> tensor<(?:\d+x)+\w+, (#\w+)>", ttgir)
    return sum(dtype in ("f16", "bf16") and layout in blocked for dtype, layout in found)


def load_widths(code: str, kind: str) -> dict[str, int]:
    """Global loads by the bytes that one thread takes."""
    widths: collections.Counter[int] = collections.Counter()
    for found in re.finditer(LOADS[kind], code):
        widths[_width(found.group(0), kind)] += 1
    for found in re.finditer(r"cp\.async\.c[ag]\.shared\.global[\w.:]* \[[^]]*\], \[[^]]*\], (\w+)", code):
        widths[int(found[1], 0)] += 1
    return {str(width): widths[width] for width in sorted(widths, reverse=True)}


def _width(name: str, kind: str) -> int:
    if kind == "cuda":
        vector, bits = re.search(r"\.v(\d)", name), re.search(r"\.[busf](\d+)$", name)
        return (int(vector[1]) if vector else 1) * int(bits[1] if bits else 0) // 8
    kind_of = name.split("_load_")[1]
    for word, width in WIDTHS.items():
        if kind_of.startswith(word):
            times = re.search(r"x(\d)", kind_of)
            return width * (int(times[1]) if times else 1)
    raise ValueError(f"a load of unknown width: {name}")


# addresses

_DEF = re.compile(r"^\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?(.*)$")
_LOOP = re.compile(r"scf\.for (%\w+) = (%\w+) to (%\w+) step")
_POINTER = re.compile(r"tt\.addptr (%\w+)[#\w]*, (%\w+)[#\w]* : [^,]+, (?:tensor<[\dx]*)?(i32|i64)\b")
_THROUGH = (
    *("tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "tt.unsplat", "tt.join", "tt.cat"),
    *("arith.addi", "arith.subi", "arith.muli", "arith.shli", "arith.divsi", "arith.divui", "arith.remsi"),
    *("arith.minsi", "arith.maxsi", "arith.xori", "arith.ori", "arith.select", "arith.shrsi", "arith.shrui"),
)
_PART_OF = ("arith.andi", "arith.remsi", "arith.remui")  # with a constant: below it


class _Defs:
    """Definitions of a TTIR module and what they depend on; every name made its region's own."""

    def __init__(self, ttir: str):
        self.defs: dict[str, tuple[str, list[str], str]] = {}
        self.pointers: list[tuple[str, str, str]] = []  # base, offset and the offset's type
        scopes: list[dict[str, str]] = [{}]

        def known(name: str) -> str:
            return next((scope[name] for scope in reversed(scopes) if name in scope), name)

        def define(name: str, op: str, operands: list[str], rest: str) -> None:
            scopes[-1][name] = f"{name}.{len(self.defs)}"
            self.defs[scopes[-1][name]] = (op, operands, rest)

        for line in ttir.splitlines():
            line = re.sub(r" loc\(.*\)$", "", line).rstrip()
            if line.lstrip().startswith("}") and len(scopes) > 1:
                scopes.pop()
            found, loop, pointer = _DEF.match(line), _LOOP.search(line), _POINTER.search(line)
            if pointer:
                self.pointers.append((pointer[1], known(pointer[2]), pointer[3]))
            ends = [known(loop[2]), known(loop[3])] if loop else []
            if found:
                name, op, rest = found.groups()
                define(name, op, [known(each) for each in re.findall(r"%\w+", rest.partition(" : ")[0])], rest)
            if line.endswith("{"):
                scopes.append({})
                if loop:
                    define(loop[1], "loop", ends, "")  # between its ends
                    for carried in re.findall(r"(%\w+) = ", line[loop.end() :]):
                        define(carried, "scf.carried", [], "")

    def bounded(self, name: str) -> bool:
        """Whether a value is made of constants and ranges alone, so that compile time knows how large it is."""
        if name not in self.defs:
            return False
        op, operands, rest = self.defs[name]
        if op in ("tt.make_range", "arith.constant"):
            return True
        if op in _PART_OF and self.constant(operands[-1]):
            return True
        if op in ("arith.extui", "arith.extsi", "arith.trunci") and re.search(r": (?:tensor<[\dx]*)?i(1|8|16)\b", rest):
            return True
        return op in ("loop", *_THROUGH) and bool(operands) and all(map(self.bounded, operands))

    def constant(self, name: str) -> bool:
        op, operands, _ = self.defs.get(name, ("", [], ""))
        return op == "arith.constant" or (op == "tt.splat" and all(map(self.constant, operands)))

    def products(self, name: str, strict: bool, seen: set[str]) -> list[str]:
        """32-bit products on the way to ``name`` that 32 bits may not hold.

        Of two numbers that compile time does not know; where ``strict``, of one such number and anything.
        """
        if name in seen or name not in self.defs:
            return []
        seen.add(name)
        op, operands, _ = self.defs[name]
        if op.startswith("scf."):  # what a region yields or carries is not followed: any product may be it
            return [product for other in self.defs for product in self._product(other, strict)]
        if op in ("arith.extui", "arith.extsi") and self.bounded(name):
            return []
        found = self._product(name, strict)
        if op in (*_THROUGH, "arith.extsi", "arith.extui"):
            for operand in operands:  # a quotient counts again what was multiplied before
                found += self.products(operand, strict and not op.startswith("arith.div"), seen)
        return found

    def _product(self, name: str, strict: bool) -> list[str]:
        op, operands, rest = self.defs[name]
        if op not in ("arith.muli", "arith.shli") or re.search(r": (?:tensor<[\dx]*)?i32\b", rest) is None:
            return []
        held = (all if strict else any)(map(self.bounded, operands))
        return [] if held else [f"{name} = {op} {' '.join(operands)}"]


def narrow_addresses(ttir: str) -> list[str]:
    """Products of addresses that are computed in 32 bits and may not fit.

    A pointer may move by an i32 that counts elements along one axis, which is a sum of indices; as soon as an index is
    multiplied, by a stride or by anything, the offset must be an i64. One of type i64 must in turn not come from a
    32-bit product of two numbers known at run time only, such as a program id and a stride; a program id times the
    constant size of a tile counts elements along an axis.
    """
    defs, found = _Defs(ttir), []
    for base, offset, width in defs.pointers:
        products = defs.products(offset, width == "i32", set())
        found += [re.sub(r"\.\d+", "", f"{base} + {offset}: {product}") for product in products]
    return found
