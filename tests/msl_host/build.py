"""g++: the runtime, the precompiled prelude and every kernel as shared libraries, cached by hash."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx

from .errors import MSLCompileError, MSLError

HERE = Path(__file__).resolve().parent
MLX_HEADERS = Path(mx.__file__).parent / "include"
LIBRARY_HEADERS = ["metal/" + name for name in ("metal.h", "simd.h", "math.h", "types.h", "runtime.h")]
RUNTIME_SOURCES = ["runtime.cpp", "memory.cpp", "fiber.cpp", "runtime.h", "fiber.h", "metal/runtime.h"]
# Apple's own headers and two of MLX's that C++ cannot read; metal/metal.h holds what is needed of them.
EMPTY = ["metal_stdlib", "metal_math", "mlx/backend/metal/kernels/complex.h", "mlx/backend/metal/kernels/logging.h"]


def _has_avx2() -> bool:
    """Whether the processor has the instructions that make halves fast."""
    if os.uname().machine != "x86_64":
        return False
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return {"avx2", "bmi2", "f16c", "fma"} <= set(flags)


FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-w",
    "-g1",  # line numbers
    "-fsingle-precision-constant",  # Metal has no double: 1.0 is a float
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-gnu-unique",
    "-fstack-clash-protection",  # a large private array touches the page below the stack
    *(["-march=x86-64-v3"] if _has_avx2() else []),
]
CHECKED = [
    "-O1",
    "-fsanitize=thread,alignment,null,bounds,shift,integer-divide-by-zero",
    "-fsanitize-recover=all",
    "-fno-inline-small-functions",
]


def compiler() -> str:
    return os.environ.get("MSL_HOST_CXX", "g++")


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "msl_host"
    return Path(os.environ.get("MSL_HOST_CACHE", default)).absolute()


def unavailable() -> str | None:
    """Why kernels cannot run here, None where they can."""
    if sys.platform != "linux":
        return f"msl_host runs on Linux, this is {sys.platform}"
    for program in (compiler(), "addr2line"):
        if shutil.which(program) is None:
            return f"msl_host needs {program}, which is not installed (g++ 12 or newer brings it)"
    version = subprocess.run([compiler(), "-dumpversion"], capture_output=True, text=True).stdout
    if not version.strip() or int(version.split(".")[0]) < 12:
        return f"msl_host needs g++ 12 or newer, {compiler()} is {version.strip() or 'another compiler'}"
    return None


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


@functools.cache
def contents(names: tuple[str, ...]) -> str:
    return digest(*[(HERE / name).read_bytes() for name in names], compiler(), FLAGS, str(HERE), str(MLX_HEADERS))


def compile_to(target: Path, *arguments: object) -> None:
    """Run the compiler; the target appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    command = [compiler(), *map(str, arguments), "-o", str(temporary)]
    environment = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cache_folder())
    if result.returncode:
        raise MSLCompileError(tidy(result.stderr))
    os.replace(temporary, target)


def tidy(errors: str) -> str:
    """The compiler's errors, each with the nearest line of the kernel where it was found in a header."""
    lines = [line for line in errors.splitlines() if re.search(r": (?:fatal )?error: |required from|\.metal:\d+", line)]
    ours = str(HERE)
    shown = [line for line in lines if not line.startswith(ours) or " error: " in line]
    return "\n".join(line.replace(ours + "/", "") for line in shown[:20]) or errors[:4000]


@functools.cache
def runtime() -> Path:
    folder = cache_folder()
    path = folder / f"runtime-{contents(tuple(RUNTIME_SOURCES))}.so"
    if not path.exists():
        reason = unavailable()
        if reason:
            raise MSLError(reason)
        sources = [HERE / name for name in RUNTIME_SOURCES if name.endswith(".cpp")]
        portable = ["-DMSL_PORTABLE"] if os.environ.get("MSL_HOST_PORTABLE") else []
        compile_to(path, "-std=c++17", "-O2", "-fPIC", "-shared", *portable, *sources, f"-Wl,-soname,{path.name}")
    return path


def prelude(flags: list[str]) -> list[str]:
    """Arguments that include metal/metal.h from a precompiled header."""
    folder = cache_folder() / f"prelude-{digest(contents(tuple(LIBRARY_HEADERS)), flags)}"
    include = [f"-I{path}" for path in (folder, HERE / "metal", MLX_HEADERS)]
    if not (folder / "prelude.h.gch").exists():
        for name in EMPTY:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        (folder / "prelude.h").write_text('#include "metal.h"\n')
        compile_to(folder / "prelude.h.gch", *flags, *include, "-x", "c++-header", folder / "prelude.h")
    return [*include, "-include", str(folder / "prelude.h")]


def build(cpp: str, check: bool, contract: bool, fast: bool) -> tuple[Path, float]:
    """The library of a kernel and the seconds it took to build, 0 where it was there."""
    flags = [*FLAGS, *(CHECKED if check else ["-O2"]), f"-ffp-contract={'fast' if contract else 'off'}"]
    flags += ["-ffast-math"] if fast else []
    flags += [f"-fdebug-prefix-map={cache_folder()}=."]  # names of files stay as the source gives them
    hashes = contents((*LIBRARY_HEADERS, "build.py")), runtime().name
    path = cache_folder() / f"kernel-{digest(cpp, flags, *hashes)}.so"
    if path.exists():
        return path, 0.0
    began = time.perf_counter()
    source = path.with_suffix(f".{os.getpid()}.cpp")
    compiled = source.with_suffix(".o")
    source.write_text(cpp)
    try:
        compile_to(compiled, *flags, *prelude(flags), "-c", source)
        # Linked apart and without those flags: the sanitizers' own libraries stay out.
        compile_to(path, "-shared", compiled, runtime(), f"-Wl,-rpath,{cache_folder()}")
    finally:
        source.unlink()
        compiled.unlink(missing_ok=True)
    return path, time.perf_counter() - began


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def locate(path: Path, addresses: list[int]) -> dict[int, str]:
    """``file:line`` in the kernel's own text of return addresses in its library, where they lie in it."""
    with open("/proc/self/maps") as maps:
        mapped = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(str(path))]
    if not mapped:
        return {}
    base, end = int(mapped[0][0], 16), int(mapped[-1][1], 16)
    inside = [address for address in addresses if base < address < end]
    if not inside:
        return {}
    command = ["addr2line", "-a", "-i", "-e", str(path), *[hex(address - 1 - base) for address in inside]]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    found = {}
    for address, part in zip(inside, re.split(r"^0x.*\n", output, flags=re.M)[1:]):
        frames = [os.path.normpath(frame.split(" (")[0]) for frame in part.splitlines()]
        ours = [frame for frame in frames if is_kernel_text(frame) and not frame.endswith((":0", ":?"))]
        if ours:
            found[address] = ours[0]
    return found


def is_kernel_text(file: str) -> bool:
    return not file.startswith((str(HERE), str(MLX_HEADERS), "??", "launcher"))
