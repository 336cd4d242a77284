"""The wheel holds what it should and nothing else at top level."""

import os
import subprocess
import sys
import sysconfig
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, without the network."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "dkv", "kernels", "reference"):
        os.symlink(ROOT / name, source / name)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(work)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = work.glob("*.whl")
    return built


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


def test_wheel_installs_and_every_module_imports(wheel, tmp_path):
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
