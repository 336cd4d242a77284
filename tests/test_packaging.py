"""The wheel holds what it should and nothing else at top level."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _folder(package: str) -> Path:
    """Where a package's sources lie, by the package-dir mapping."""
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    parts = package.split(".")
    for cut in range(len(parts), 0, -1):
        prefix = ".".join(parts[:cut])
        if prefix in mapping:
            return ROOT.joinpath(mapping[prefix], *parts[cut:])
    raise AssertionError(f"{package} is mapped nowhere")


def test_the_package_list_names_every_folder_with_code():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    found = set()
    for name, base in (("dkv", "dkv"), ("dkv.kernels", "kernels"), ("dkv.reference", "reference")):
        for init in (ROOT / base).rglob("__init__.py"):
            found.add(".".join((name, *init.parent.relative_to(ROOT / base).parts)))
        for module in (ROOT / base).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), f"{module.parent} has modules but no __init__.py"
    assert listed == found
    for package in listed:
        assert len(list(_folder(package).glob("*.py"))) > 0


def build(kind: str, source: Path, folder: Path) -> Path:
    """A "wheel" or an "sdist" of sources, without the network."""
    folder.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with the sources that are packed."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "dkv", "kernels", "reference"):
        os.symlink(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel") / "built")


def test_wheel_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"dkv"}
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        inside = package.replace(".", "/")
        for source in _folder(package).iterdir():
            if source.suffix in (".py", ".metal") or source.name == "py.typed":
                assert f"{inside}/{source.name}" in names
    assert "dkv/py.typed" in names
    profiles = {path.name for path in (ROOT / "dkv" / "profiles").iterdir()}
    assert "text.txt" in profiles and {f"dkv/profiles/{name}" for name in profiles} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_k02_k03_the_wheel_installs_and_every_module_imports(wheel, tmp_path):
    """flash-float-jit-kernels#17, AutoGPTQ#594, pyvkfft#23, aiter#115: kernel sources or sub-packages were left out."""
    home = tmp_path / "env"
    venv.EnvBuilder(with_pip=True, symlinks=os.name != "nt").create(home)
    python = home / "bin" / "python"
    site = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    # the packages that dkv needs come from the environment the tests run in; its own dkv must not
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    code = f"""
import importlib, pkgutil, sys
sys.path += {others!r}
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import dkv
assert dkv.__file__.startswith({site!r}), dkv.__file__
names = [module.name for module in pkgutil.walk_packages(dkv.__path__, "dkv.") if not module.name.endswith("__main__")]
for name in names:
    module = importlib.import_module(name)
    assert module.__file__.startswith({site!r}), (name, module.__file__)
print(*names)
"""
    done = subprocess.run([str(python), "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = set(done.stdout.split())
    assert set(PROJECT["tool"]["setuptools"]["packages"]) - {"dkv"} <= imported
    assert {"dkv.reference.decode", "dkv.kernels.torch.decode", "dkv.models", "dkv.cli.demo"} <= imported


def test_version_is_stated_once(wheel):
    import dkv
    from dkv._version import __version__

    assert dkv.__version__ == __version__
    assert wheel.name.split("-")[1] == __version__
    assert "version" not in PROJECT["project"]


def test_extras_keep_to_their_rules():
    extras = PROJECT["project"]["optional-dependencies"]
    assert "torch==2.13.0" in extras["demo"]
    assert any(each.startswith("dkv[demo") for each in extras["test"])
    for name in ("torch", "triton", "mlx", "transformers", "mlx-lm"):
        for requirement in extras[name]:
            assert requirement.startswith("dkv[") or (">=" in requirement and "==" not in requirement.split(";")[0])
    assert [each.split(">=")[0] for each in PROJECT["project"]["dependencies"]] == ["numpy"]


def test_k02_the_sdist_builds_the_same_wheel(wheel, source, tmp_path):
    """flash-float-jit-kernels#17, AutoGPTQ#594, pyvkfft#23: kernel sources were in the checkout and nowhere else."""
    with tarfile.open(build("sdist", source, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        files = {name: one.read(name) for name in one.namelist() if not name.endswith(".dist-info/RECORD")}
        assert files == {name: other.read(name) for name in other.namelist() if not name.endswith("/RECORD")}
    assert sum(name.endswith(".metal") for name in files) == len(list((ROOT / "kernels" / "mlx").glob("*.metal"))) > 0


PLACES = {
    "macOS on ARM": {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"},
    "Linux on ARM": {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "aarch64"},
    "Linux": {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"},
    "Windows": {"sys_platform": "win32", "platform_system": "Windows", "platform_machine": "AMD64", "os_name": "nt"},
}


def needed(place, extra=None):
    """What pip would install on a machine: the name and extras of each requirement whose marker holds."""
    requirements = pytest.importorskip("packaging.requirements")
    project, found = PROJECT["project"], set()
    listed = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    for requirement in map(requirements.Requirement, listed):
        if requirement.marker is not None and not requirement.marker.evaluate(PLACES[place]):
            continue
        if requirement.name == "dkv":
            found = found.union(*(needed(place, other) for other in requirement.extras))
        else:
            found.add(requirement.name + (f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""))
    return found


@pytest.mark.parametrize("place", PLACES)
def test_k01_only_extras_need_more_than_numpy(place):
    """triton#2371, #1465, #3621, img2img-turbo#76: a hard dependency on triton kept macOS and ARM from installing."""
    assert needed(place) == {"numpy"}
    assert ("triton" in needed(place, "triton")) == place.startswith("Linux")
    for extra in PROJECT["project"]["optional-dependencies"]:
        found = needed(place, extra)
        assert place.startswith("Linux") or "triton" not in found, extra
        assert place != "Windows" or not any(name.startswith("mlx[") or name == "mlx" for name in found), extra


def test_k07_mlx_on_linux_is_the_cpu_build():
    """mlx#2462, mlx#3240: the plain wheel is a CUDA build on Linux, and the one for CPUs an extra of it."""
    for extra in ("mlx", "mlx-lm", "test"):
        assert "mlx" in needed("macOS on ARM", extra) and "mlx[cpu]" not in needed("macOS on ARM", extra)
        assert "mlx[cpu]" in needed("Linux", extra) and "mlx" not in needed("Linux", extra)


@pytest.mark.parametrize("hidden", ["torch", "triton", "mlx", "transformers", "torch triton mlx transformers"])
def test_k05_what_is_not_installed_is_not_imported_and_is_named(hidden):
    """mlx#3148: importing a backend ended the process; one that is absent is to be told, with how to install it."""
    code = f"""
import sys
from importlib.machinery import PathFinder
hidden, find = {hidden.split()!r}, PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find(name, path, target)
PathFinder.find_spec = find_spec
import numpy as np
import dkv
needs = {{"torch": ["torch", "triton"], "triton": ["triton"], "mlx": ["mlx", "mlx-metal", "mlx-twin"]}}
rows, reasons = np.ones((1, 1, 2, 4), np.float32), dkv.available_backends()
absent = {{backend for name in hidden for backend in needs.get(name, ())}}
assert reasons["reference"] is None
for backend in absent:
    extra = backend.partition("-")[0]
    assert f'pip install "dkv[{{extra}}]"' in reasons[backend], reasons
    try:
        dkv.exact_attention(rows, rows, rows, backend=backend)
    except ImportError as error:
        assert f'pip install "dkv[{{extra}}]"' in str(error), error
    else:
        raise AssertionError(backend)
assert dkv.exact_attention(rows, rows, rows).lse.shape == (1, 1, 2)
assert not {{"torch", "triton", "mlx", "transformers"}} & {{name.partition(".")[0] for name in sys.modules}}
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
