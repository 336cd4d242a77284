"""Bad arguments to every public function: a result or an error that names the argument, and inputs as they were."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent))

import dkv
from bench import hostile

EACH = 12  # calls of every function; `python -m bench.faults` makes more


@pytest.mark.parametrize("library", hostile.libraries())
def test_bad_arguments_are_named_and_change_nothing(library):
    counts, failed = hostile.run(0, EACH, library)
    assert not failed, "\n".join(failed)
    assert counts[hostile.REFUSED] > counts[hostile.RESULT] > 0


def test_every_public_function_and_every_argument_is_tried():
    calls = hostile.calls("numpy")
    tried = {name.partition(".")[0] for name in calls}
    assert tried >= set(dkv.__all__) - {"AttentionState", "__version__", "available_backends"}
    for name, (call, arguments) in calls.items():
        named = {each for each, kind in inspect.signature(call).parameters.items() if kind.kind is not kind.VAR_KEYWORD}
        assert named == set(arguments), name


@pytest.mark.parametrize("library", hostile.libraries())
def test_rows_without_channels_are_refused(library):
    for name in ("exact_attention", "prefill_attention"):
        call, given = hostile.calls(library)[name]
        with pytest.raises(ValueError, match="v must have at least one channel"):
            call(**{**given, "v": given["v"][..., :0]})


def test_what_misbehaves_is_told():
    def careless(q):
        q[:] = 0

    def silent(q):
        raise ValueError("something is wrong")

    def broken(q):
        raise KeyError("q")

    q = hostile.calls("numpy")["exact_attention"][1]["q"]
    for call, message in ((careless, "changed"), (silent, "no argument is named"), (broken, "KeyError")):
        with pytest.raises(hostile.Misbehaved, match=message):
            for seed in range(50):
                hostile.tried(hostile.Random(seed), "op", call, {"q": q.copy()})
