"""Merge attention states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dkv import _checks as check
from dkv._dispatch import op_module, resolve
from dkv.types import AttentionState


def merge_states(states: Sequence[AttentionState], *, backend: str | None = None) -> AttentionState:
    """Attention over the union of disjoint key sets, from the states of the parts.

    Parameters
    ----------
    states : sequence of AttentionState
        At least one; ``out [B, Hq, Sq, Dv]`` and ``lse [B, Hq, Sq]``, natural log. A state whose lse is -inf (or +inf,
        as some kernels mark it) is empty, and whatever its ``out`` holds is ignored.
    backend : str, optional

    Returns
    -------
    AttentionState
        New arrays; empty where every part is empty.
    """
    if isinstance(states, AttentionState) or hasattr(states, "dtype") or not isinstance(states, Iterable):
        raise TypeError(f"states must be a sequence of AttentionState, got {type(states).__qualname__}")
    states = list(states)
    for index, state in enumerate(states):
        if not (isinstance(state, (tuple, list)) and len(state) == 2):
            raise TypeError(f"states[{index}] must be an AttentionState, got {type(state).__qualname__}")
    states = [AttentionState(*state) for state in states]
    if not states:
        raise ValueError("states must hold at least one AttentionState, got none")
    arrays = {}
    for index, (out, lse) in enumerate(states):
        if index == 0:
            check.check_array("states[0].out", out, "B Hq Sq Dv")
            check.check_channels("states[0].out", out)
        shape = states[0].out.shape
        sizes = {"B": shape[0], "Hq": shape[1], "Sq": shape[2], "Dv": shape[3]}
        check.check_array(f"states[{index}].out", out, "B Hq Sq Dv", **sizes)
        check.check_array(f"states[{index}].lse", lse, "B Hq Sq", **sizes)
        check.check_float(f"states[{index}].out", out)
        if check.dtype_name(lse) != "float32":
            raise TypeError(f"states[{index}].lse must be float32, got {check.dtype_name(lse)}")
        arrays.update({f"states[{index}].out": out, f"states[{index}].lse": lse})
    chosen = resolve(backend, **arrays)
    check.check_device(**arrays)
    outs, lses = [state.out for state in states], [state.lse for state in states]
    return AttentionState(*op_module(chosen, "merge").merge_states(outs, lses))
