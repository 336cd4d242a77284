"""Head profiles: files come back as they were or are refused by the field that is wrong; measuring is what it says."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from dkv import HeadProfile
from dkv.profile import MAX_BYTES, shipped_names

FIELDS = {
    "model": "tiny",
    "num_layers": 2,
    "num_kv_heads": 3,
    "head_dim": 8,
    "scores": [[0.5, 0, 1], [0.25, 1 / 3, 1e-9]],
    "text": "a book",
    "settings": {"passages": 2, "distances": [300, 700], "seconds": 0.5},
}


def profile(**changes):
    return HeadProfile(**{**FIELDS, **changes})


def written(path, **changes):
    """A file with fields changed; those that are None are left out."""
    values = {"format": "dkv-profile", "version": 1, **FIELDS, **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return path


def test_a_profile_comes_back_as_it_was(tmp_path):
    made = profile()
    made.save(tmp_path / "p.json")
    assert HeadProfile.load(tmp_path / "p.json") == made
    assert HeadProfile.load(str(tmp_path / "p.json")).scores == ((0.5, 0.0, 1.0), (0.25, 1 / 3, 1e-9))
    assert HeadProfile.from_dict(made.to_dict()) == made == profile(scores=np.array(FIELDS["scores"]))
    assert made.settings["distances"] == (300, 700)
    assert hash(made) == hash(profile()) and made != profile(text="another")
    values = json.loads((tmp_path / "p.json").read_text())
    assert values["format"] == "dkv-profile" and values["version"] == 1
    assert os.listdir(tmp_path) == ["p.json"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    profile().save(tmp_path / "p.json")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        profile(text="new").save(tmp_path / "p.json")
    assert HeadProfile.load(tmp_path / "p.json") == profile() and os.listdir(tmp_path) == ["p.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "format of .*p.json must be 'dkv-profile'"),
        ({"format": None}, "format of .*p.json must be 'dkv-profile'"),
        ({"version": 2}, "version of .*p.json is 2, this dkv reads 1"),
        ({"version": True}, "version of .*p.json is True, this dkv reads 1"),
        ({"version": None}, "version of .*p.json is None"),
        ({"model": 3}, "p.json: model of a profile must be a string, got 3"),
        ({"text": ["x"]}, "text of a profile must be a string"),
        ({"num_layers": 0}, r"num_layers of a profile must be an int in 1\.\.4096, got 0"),
        ({"num_layers": 3}, "scores of a profile must have num_layers=3 layers, got 2"),
        ({"num_layers": 10**9}, "num_layers of a profile must be"),
        ({"num_kv_heads": "3"}, "num_kv_heads of a profile must be an int in .*, got '3'"),
        ({"num_kv_heads": 2}, "scores of a profile must have num_kv_heads=2 numbers in layer 0, got 3"),
        ({"head_dim": 8.0}, "head_dim of a profile must be an int"),
        ({"head_dim": True}, "head_dim of a profile must be an int"),
        ({"scores": [[0.5, 0, 1]]}, "scores of a profile must have num_layers=2 layers, got 1 layers"),
        ({"scores": 0.5}, "scores of a profile must have num_layers=2 layers, got no list"),
        ({"scores": [[0.5, 0, 1], [0.5, 0]]}, "num_kv_heads=3 numbers in layer 1, got 2"),
        ({"scores": [[0.5, 0, 1], "0.5"]}, "num_kv_heads=3 numbers in layer 1, got no list"),
        ({"scores": [[0.5, 0, 1], [0.5, 0, 1.1]]}, r"numbers in 0\.\.1, got 1\.1 \(layer 1, head 2\)"),
        ({"scores": [[0.5, -1e-9, 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got -1e-09 \(layer 0, head 1\)"),
        ({"scores": [[0.5, float("nan"), 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got nan \(layer 0, head 1\)"),
        ({"scores": [[0.5, float("inf"), 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got inf"),
        ({"scores": [[0.5, True, 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got True"),
        ({"scores": [[0.5, "0.1", 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got '0\.1'"),
        ({"scores": [[0.5, 10**400, 1], [0.5, 0, 1]]}, r"numbers in 0\.\.1, got 1000"),
        ({"settings": [1]}, r"settings of a profile must be a mapping, got \[1\]"),
        ({"settings": {"a": "b"}}, "settings of a profile must be named finite numbers, got 'a': 'b'"),
        ({"settings": {"a": [1, float("nan")]}}, "settings of a profile must be named finite numbers, got 'a'"),
        ({"settings": None}, r"fields of a profile: missing \['settings'\]"),
        ({"extra": 1}, r"unknown \['extra'\]"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        HeadProfile.load(written(tmp_path / "p.json", **changes))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    profile().save(tmp_path / "whole.json")
    data = (tmp_path / "whole.json").read_bytes()
    for length in range(len(data) - 2):  # without its last line break it is whole
        (tmp_path / "cut.json").write_bytes(data[:length])
        with pytest.raises(ValueError, match="cut.json is not a whole profile"):
            HeadProfile.load(tmp_path / "cut.json")


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"[" * 100_000, b"[1]", b"3", b"null", b'{"a": 1} {}'])
def test_files_that_are_no_profile(tmp_path, data):
    (tmp_path / "p.json").write_bytes(data)
    with pytest.raises(ValueError, match="p.json (is not a whole profile|must be 'dkv-profile')"):
        HeadProfile.load(tmp_path / "p.json")


def test_a_file_too_large_is_refused_before_it_is_read_whole(tmp_path):
    with open(tmp_path / "p.json", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match=r"p.json is larger than a profile can be \(4,194,304 bytes\)"):
        HeadProfile.load(tmp_path / "p.json")
    with pytest.raises(FileNotFoundError, match="no such profile: .*none.json"):
        HeadProfile.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match="no such profile"):
        HeadProfile.load(tmp_path)


def test_a_model_of_another_shape_is_refused():
    made = profile()
    made.check_model(2, 3, 8)
    for shape, message in (
        ((24, 3, 8), "profile is of a model with 2 layers, this one has 24"),
        ((2, 8, 8), "profile is of a model with 3 kv heads, this one has 8"),
        ((2, 3, 64), "profile is of a model with head dim 8, this one has 64"),
    ):
        with pytest.raises(ValueError, match=message):
            made.check_model(*shape)


def test_an_unknown_shipped_profile_names_those_that_ship():
    with pytest.raises(ValueError, match="no profile ships for 'nope'; there are: .*" + ", ".join(shipped_names())):
        HeadProfile.shipped("nope")
    with pytest.raises(ValueError, match="no profile ships for"):
        HeadProfile.shipped("../profile")
