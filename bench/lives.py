"""The state machines and the soak of ``bench.faults``: operations counted by name, figures of a long stream."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, settings, stateful

TESTS = Path(__file__).resolve().parent.parent / "tests"


def machines() -> dict[str, Callable[[], Any]]:
    """The state machines of ``tests/`` whose packages are installed, each made when it is called."""
    sys.path.append(str(TESTS))
    made: dict[str, Callable[[], Any]] = {}
    if find_spec("transformers"):
        made["caches of transformers"] = _transformers
    if find_spec("mlx_lm"):
        made["caches of mlx-lm"] = _mlx
    return made


def _transformers() -> Any:
    from lifecycle_machine import CacheMachine

    return CacheMachine


def _mlx() -> Any:
    import lifecycle_mlx_machine as machine

    machine.hook()
    return machine.MlxCacheMachine


def lived(machine: Any, examples: int, seed: int) -> tuple[Counter[str], str | None]:
    """Operations by name over so many lives, and what failed first, if anything did."""
    counts: Counter[str] = Counter()
    tried = hypothesis.seed(seed)(_counted(machine, counts))
    every = list(HealthCheck)
    options = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=every,
    )
    try:
        with torch.no_grad():
            stateful.run_state_machine_as_test(tried, settings=options)
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        return counts, f"{machine.__name__}: {error!r:.500} (seed {seed}) {notes:.3000}"
    return counts, None


def _counted(machine: Any, counts: Counter[str]) -> Any:
    """The machine with every rule counted when it runs."""
    rules = {}
    for name, method in inspect.getmembers(machine):
        marked = getattr(method, stateful.RULE_MARKER, None)
        if marked is not None:
            made = stateful.rule(**marked.arguments)(_counting(marked.function, name, counts))
            for condition in marked.preconditions:
                made = stateful.precondition(condition)(made)
            rules[name] = made
    return type(machine.__name__, (machine,), rules)


def _counting(function: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def counted(*positional: Any, **arguments: Any) -> Any:
        counts[name] += 1
        return function(*positional, **arguments)

    counted.__name__ = name
    return counted


def soaked(tokens: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Largest figures of ``bench.soak``, and the bounds that broke."""
    from bench import soak

    with torch.inference_mode():
        rows, most = soak.run(tokens, seed=seed), soak.most_bytes()
    figures = {name: max(row[name] for row in rows) for name in ("tokens", "lse_error", "out_error", "largest_bytes")}
    growth = {f"more {name}": rows[-1][name] - rows[0][name] for name in ("resident_bytes", "objects")}
    return {**figures, **growth}, [f"soak: {name}" for name in soak.broken(rows, most)]
