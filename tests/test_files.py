"""Files are whole or refused: spoilt ones by one clear error, killed and failing writers without a trace."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parent.parent))

import dkv
from bench import fuzz_files, kill_writer
from bench.fuzz_files import closed, opened
from dkv import _files, testing
from dkv._json import write_json
from dkv._paths import MARK, replaced

KINDS = {
    "blocks": fuzz_files.blocks_kind,
    "torch": lambda folder: fuzz_files.blocks_kind(folder, "torch"),
    "cache": fuzz_files.cache_kind,
    "profile": fuzz_files.profile_kind,
    "prompt cache": fuzz_files.prompt_cache_kind,
}
KILLS = 40
NEEDED = {"torch": "torch", "cache": "transformers", "prompt cache": "mlx_lm"}
made: dict[str, fuzz_files.Kind] = {}


@pytest.fixture(params=KINDS)
def kind(request, tmp_path_factory):
    name = request.param
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    if name not in made:
        made[name] = KINDS[name](tmp_path_factory.mktemp(name.replace(" ", "")))
    return made[name]


def blocks(seed=0, **options):
    return testing.make_inputs(seed, **options).blocks


def refused(kind, data, folder):
    assert fuzz_files.tried(kind, data, False, folder) == "refused"


# spoilt


@settings(max_examples=4 * settings().max_examples)
@given(st.randoms(use_true_random=False))
def _spoilt(kind, folder, rng):
    fuzz_files.tried(kind, *fuzz_files.mutant(rng, kind), folder)


def test_a_spoilt_file_is_refused_or_is_what_it_was(kind, tmp_path):
    _spoilt(kind, tmp_path)


def test_a_file_cut_at_any_region_is_refused(kind, tmp_path):
    size = len(kind.whole)
    head = 8 + int.from_bytes(kind.whole[:8], "little") if kind.container else 0
    for length in sorted({0, 1, 7, 8, 9, head // 2, head - 1, head, head + 1, (head + size) // 2, size - 3} - {-1}):
        if 0 <= length < size - 2:
            refused(kind, kind.whole[:length], tmp_path)
    if kind.container:
        refused(kind, kind.whole + b"\0", tmp_path)


def test_a_bit_of_the_payload_is_noticed(kind, tmp_path):
    if not kind.container:
        at = kind.whole.index(b'"scores"') + 15
        place = next(
            i for i in range(at, len(kind.whole)) if kind.whole[i : i + 1].isdigit() and kind.whole[i - 1] == 46
        )
        refused(kind, fuzz_files._flipped(kind.whole, 8 * place), tmp_path)
        return
    head = 8 + int.from_bytes(kind.whole[:8], "little")
    rng = np.random.default_rng(0)
    for bit in [8 * head, 8 * len(kind.whole) - 1, *rng.integers(8 * head, 8 * len(kind.whole), 20)]:
        refused(kind, fuzz_files._flipped(kind.whole, int(bit)), tmp_path)


def changed(kind, change):
    """The file with its entries changed, and a checksum that fits."""
    entries, payload = opened(kind.whole)
    change(entries)
    return closed(entries, payload, kind.key)


def first(entries):
    return next(entry for name, entry in entries.items() if name != "__metadata__")


SIZES = [[2**62, 4], [-1, 4], [2**40], [10**30], [1.5], ["2"], [True], [float("nan")], [[1]], [1] * 9, None, "2", {}]
OFFSETS = [[0, 2**62], [-8, 0], [0, 2**42], [8, 0], [0], [0, 8, 16], [0.0, 8.0], None, [1, 9]]


@pytest.mark.parametrize("name", ["shape", "data_offsets", "dtype"])
def test_hostile_sizes_are_refused_though_the_checksum_fits(kind, name, tmp_path):
    if not kind.container:
        return
    for value in {"shape": SIZES, "data_offsets": OFFSETS, "dtype": ["F8", "C64", "", 3, None, ["F32"]]}[name]:
        data = changed(kind, lambda entries, value=value: first(entries).update({name: value}))
        assert fuzz_files.tried(kind, data, True, tmp_path) == "refused", value


def test_files_of_another_version_or_kind_and_no_files_of_ours_are_refused(kind, tmp_path):
    marker = tmp_path / "executed"
    for data in (
        b"",
        b"\0" * 100,
        pickle.dumps(_Executes(str(marker))),
        b"\x80\x04" + kind.whole,
        b"{}",
        b"[]",
        b'"x"',
    ):
        refused(kind, data, tmp_path)
    assert not marker.exists()
    for deep in (b"[" * 100_000, b'{"a":' * 100_000, b"{" + b'"a":{"b":' * 300 + b"1" + b"}" * 601):
        refused(kind, len(deep).to_bytes(8, "little") + deep if kind.container else deep, tmp_path)
    for head in (
        b'{"a": 1, "a": 2}',
        b'{"__metadata__": {}, "__metadata__": {}}',
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"\\u0000": 1}',
    ):
        refused(kind, len(head).to_bytes(8, "little") + head if kind.container else head, tmp_path)
    for other in made.values():
        if (
            other.suffix == kind.suffix
            and other.container
            and "torch" not in (other.name + kind.name)
            and other is not kind
        ):
            refused(kind, other.whole, tmp_path)


def test_a_name_that_comes_twice_is_refused_though_the_last_one_is_right(kind, tmp_path):
    if kind.container:
        size = int.from_bytes(kind.whole[:8], "little")
        head = b'{"__metadata__":{},' + kind.whole[9 : 8 + size]
        data = len(head).to_bytes(8, "little") + head + kind.whole[8 + size :]
    else:
        data = kind.whole.replace(b"{", b'{"model": "another",', 1)
    refused(kind, data, tmp_path)


def test_an_error_does_not_quote_a_long_file(tmp_path):
    path = tmp_path / "blocks"
    blocks().save(str(path))
    entries, payload = opened(path.read_bytes())
    header = json.loads(entries["__metadata__"]["dkv"])
    header["format"]["x" * 5000] = 1
    entries["__metadata__"]["dkv"] = json.dumps(header)
    path.write_bytes(closed(entries, payload, "sha256"))
    with pytest.raises(ValueError, match="blocks: format of the file") as caught:
        dkv.CompressedBlocks.load(str(path))
    assert len(str(caught.value)) < 1500


class _Executes:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_another_version_is_named(tmp_path):
    path = tmp_path / "blocks"
    blocks().save(str(path))
    entries, payload = opened(path.read_bytes())
    header = json.loads(entries["__metadata__"]["dkv"])
    for version in (2, 4, True, "3", None, 3.0):
        entries["__metadata__"]["dkv"] = json.dumps({**header, "version": version})
        path.write_bytes(closed(entries, payload, "sha256"))
        with pytest.raises(ValueError, match=f"blocks is not a whole .*its version is {version!r}, .* of version 3"):
            dkv.CompressedBlocks.load(str(path))


def test_no_memory_is_taken_for_what_a_file_only_claims(tmp_path):
    """In a process that has little: files of a few bytes, and one that is a terabyte of holes."""
    path = tmp_path / "blocks"
    blocks().save(str(path))
    entries, _ = opened(path.read_bytes())
    only = {"__metadata__": entries["__metadata__"], "u": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}
    (tmp_path / "claims").write_bytes(closed(only, b""))
    (tmp_path / "holes").write_bytes(closed(only, b""))
    with open(tmp_path / "holes", "rb+") as file:
        file.truncate(os.path.getsize(tmp_path / "holes") + 2**40)
    (tmp_path / "header").write_bytes((2**40).to_bytes(8, "little"))
    with open(tmp_path / "header", "rb+") as file:
        file.truncate(2**41)
    (tmp_path / "many").write_bytes(b"[" + b"[]," * 5_000_000 + b"[]]")
    code = """
import resource, sys, dkv
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (768 << 20), size + (768 << 20)))
for name in ("claims", "holes", "header", "many"):
    for load in (dkv.CompressedBlocks.load, dkv.HeadProfile.load):
        try:
            load(f"{sys.argv[1]}/{name}")
            print("loaded")
        except ValueError as error:
            print("ok" if name in str(error) else error)
"""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("the size of a process is read from /proc")
    done = subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.split("\n") == ["ok"] * 8 + [""], done.stdout + done.stderr


# paths


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.symlink(tmp_path / "gone", tmp_path / "broken")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    (tmp_path / "empty").touch()
    whole = blocks()
    for load in (dkv.CompressedBlocks.load, dkv.HeadProfile.load):
        for name in ("pipe", "empty", "."):
            with pytest.raises(ValueError, match=str(tmp_path)):
                load(str(tmp_path / name))
        for name in ("broken", "none", "none/none"):
            with pytest.raises(FileNotFoundError, match="no such file"):
                load(str(tmp_path / name))
        with pytest.raises(OSError, match="loop"):
            load(str(tmp_path / "loop"))
        for path in ("a\0b", ""):
            with pytest.raises(ValueError, match="path must be a name without NUL bytes"):
                load(path)
        for path in (3, None, True, ["a"]):
            with pytest.raises(TypeError, match="path must be a string or a path"):
                load(path)
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="not one to replace"):
            whole.save(str(tmp_path / name))
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def test_a_link_stays_a_link_and_permission_bits_stay(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    blocks(0).save(str(target))
    os.chmod(target, 0o640)
    os.symlink(target, link)
    blocks(1).save(str(link))
    assert link.is_symlink() and stat.S_IMODE(target.stat().st_mode) == 0o640
    np.testing.assert_array_equal(dkv.CompressedBlocks.load(str(target)).u, blocks(1).u)
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


def test_write_json_is_atomic_and_writes_into_a_pipe(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    write_json("/dev/null", [1])
    assert not os.path.isfile("/dev/null") and os.listdir(tmp_path) == ["a.json"]


# writers that fail or are killed


@pytest.mark.parametrize("step", ["fsync", "replace", "fchmod"])
def test_a_write_that_fails_at_any_step_leaves_the_old_file_alone(step, kind, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(kind.whole)
    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space"), replaced(path) as temporary:
        Path(temporary).write_bytes(b"new")
    assert path.read_bytes() == kind.whole and os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_said_as_the_system_says_it(tmp_path):
    """The limit of a file's size stands for the disk's end: the write itself fails half way."""
    blocks().save(str(tmp_path / "blocks"))
    before = (tmp_path / "blocks").read_bytes()
    code = """
import resource, signal, sys
from dkv import testing
large = testing.make_inputs(1, num_blocks=40).blocks
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    large.save(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error.errno)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path / "blocks")], capture_output=True, text=True)
    assert done.stdout == "OSError 27\n", done.stdout + done.stderr  # EFBIG
    assert os.listdir(tmp_path) == ["blocks"] and (tmp_path / "blocks").read_bytes() == before


def test_mlx_that_cannot_write_leaves_the_old_file(tmp_path, monkeypatch):
    pytest.importorskip("mlx_lm")
    from mlx_lm.models import cache as mlx_cache

    from dkv.integrations import mlx_lm

    def full(*arguments):
        Path(arguments[0]).write_bytes(b"half")
        raise RuntimeError("[write] Unable to write 4144670 bytes to file.")

    path = tmp_path / "cache.safetensors"
    mlx_lm.save_prompt_cache(path, [mlx_lm.DKVCache(dkv.DKVConfig())])
    before = path.read_bytes()
    monkeypatch.setattr(mlx_cache, "save_prompt_cache", full)
    with pytest.raises(OSError, match="mlx cannot write .*cache.safetensors: .*Unable to write"):
        mlx_lm.save_prompt_cache(path, [mlx_lm.DKVCache(dkv.DKVConfig())])
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
    for wrong in ("cache", "cache.bin"):
        with pytest.raises(ValueError, match="path must end in .safetensors"):
            mlx_lm.load_prompt_cache(tmp_path / wrong)
    with pytest.raises(ValueError, match="metadata must leave 'sha256' free"):
        mlx_lm.save_prompt_cache(path, [], {"sha256": "x"})


def test_a_folder_that_takes_no_files_is_said_as_the_system_says_it(tmp_path):
    with pytest.raises(FileNotFoundError):
        blocks().save(str(tmp_path / "none" / "blocks"))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        blocks().save(str(tmp_path / "file" / "blocks"))
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        return  # root may write anywhere
    with pytest.raises(PermissionError):
        blocks().save(str(folder / "blocks"))


def test_what_a_killed_writer_left_goes_after_a_day(tmp_path):
    for name, age in (("old", 2e9), ("new", 0)):
        (tmp_path / f"{MARK}{name}.part").touch()
        if age:
            os.utime(tmp_path / f"{MARK}{name}.part", (0, 0))
    blocks().save(str(tmp_path / "blocks"))
    assert sorted(os.listdir(tmp_path)) == [f"{MARK}new.part", "blocks"]


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(kind, tmp_path):
    if kind.saves is None:
        return  # mlx's threads do not live on in a fork
    counts = kill_writer.killed(*kind.saves, kind.load, tmp_path / f"file{kind.suffix}", KILLS, seed=0)
    assert counts.total() == KILLS and min(counts[kill_writer.OLD], counts[kill_writer.NEW]) > 0, counts


# what other programs read


def test_files_are_safetensors_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    want = blocks(config=dkv.DKVConfig(block_size=16, rank=0, num_residuals=4))
    want.save(str(tmp_path / "blocks"))
    got = safetensors.load_file(str(tmp_path / "blocks"))
    assert got.keys() == dict(want.parts()).keys()
    for name, part in want.parts():
        assert got[name].dtype == part.dtype
        np.testing.assert_array_equal(got[name], part)
    with pytest.raises(ValueError, match="does not name dkv"):
        safetensors.save_file(got, str(tmp_path / "plain"))
        dkv.CompressedBlocks.load(str(tmp_path / "plain"))
    assert set(_files.NAMES.values()) == set(_files.SHORT)


def test_a_prompt_cache_that_mlx_lm_loaded_outlives_its_file(tmp_path):
    mx = pytest.importorskip("mlx.core")
    mlx_cache = pytest.importorskip("mlx_lm.models.cache")
    from dkv.integrations import mlx_lm

    cache, path = mlx_lm.DKVCache(dkv.DKVConfig()), tmp_path / "cache.safetensors"
    cache.layer.append(mx.ones((1, 1, 9, 8)), mx.ones((1, 1, 9, 8)))
    for save, load in (
        (mlx_cache.save_prompt_cache, mlx_cache.load_prompt_cache),
        (mlx_lm.save_prompt_cache, mlx_lm.load_prompt_cache),
        (mlx_lm.save_prompt_cache, mlx_cache.load_prompt_cache),
    ):
        save(str(path), [cache])
        (loaded,) = load(str(path))
        path.write_bytes(b"")
        assert mx.array_equal(loaded.state["k_rows"], cache.state["k_rows"])
        path.unlink()


# caches of another model


def test_rows_of_another_dtype_are_refused_by_the_file_and_by_the_step(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from dkv.integrations.transformers import DKVCache, attach

    def model(dtype, heads=1):
        shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": heads, "head_dim": 8}
        config = transformers.LlamaConfig(**shape, hidden_size=16, intermediate_size=16, vocab_size=8)
        return attach(transformers.LlamaForCausalLM(config).eval().to(dtype), dkv.DKVConfig(block_size=4, window=4))

    path, ids = str(tmp_path / "cache"), torch.zeros(1, 9, dtype=torch.long)
    saved, other = DKVCache(model(torch.float32)), model(torch.bfloat16)
    for layer in saved.layers:
        layer.state.attend(*(torch.ones(1, heads, 21, 8) for heads in (2, 1, 1)))
    saved.save(path)
    for wrong, message in ((other, "rows of torch.float32, the model computes in torch.bfloat16"), (
        model(torch.float32, 2), r"has \(kv heads, head dim\) \(1, 8\), the model has \(2, 8\)",
    )):  # fmt: skip
        cache = DKVCache(wrong)
        with torch.no_grad():
            wrong(ids, past_key_values=cache)
        before = [layer.state.k_rows.clone() for layer in cache.layers]
        with pytest.raises(ValueError, match=f"{path}: layer 0 of the file .*{message}"):
            cache.load(path)
        assert all(torch.equal(layer.state.k_rows, rows) for layer, rows in zip(cache.layers, before, strict=True))
    unknown = DKVCache(other.config, other._dkv_config).load(path)  # a config alone says no dtype
    with pytest.raises(TypeError, match="k must have the cache's dtype float32, got bfloat16"):
        unknown.layers[0].state.attend(*(torch.ones(1, heads, 1, 8, dtype=torch.bfloat16) for heads in (2, 1, 1)))
    assert unknown.layers[0].state.tokens == [21]
