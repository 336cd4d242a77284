"""Ranks that share the blocks of a sequence give what one process gives; ranks that cannot, say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

import distributed_worker as worker  # noqa: E402

import dkv  # noqa: E402
from dkv import distributed  # noqa: E402


def run(folder: Path, ranks: int, job: str) -> list[dict[str, Any] | None]:
    """What each rank left; None of one that left nothing."""
    local = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    processes = [
        subprocess.Popen(
            [sys.executable, worker.__file__, str(folder), str(rank), str(ranks), job],
            env=os.environ | local,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    missing = [rank for rank, file in enumerate(files) if not file.exists()]
    if "death" not in job:
        assert not missing, "\n".join(errors[rank][-2000:] for rank in missing)
    return [torch.load(file, weights_only=True) if file.exists() else None for file in files]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ranks"), 4, "answers,heads,refusals")


def answers_of(found, ranks: int, index: int) -> list[dict[str, Any]]:
    return [[each for each in rank["answers"] if each["ranks"] == ranks][index] for rank in found[:ranks]]


NUMBERED = [(ranks, index) for ranks in (2, 4) for index in range(len(worker.cases(ranks)))]


@pytest.mark.parametrize(("ranks", "index"), NUMBERED)
def test_ranks_together_equal_one_process(found, ranks, index):
    case = worker.cases(ranks)[index]
    given = worker.inputs(case)
    config, blocks = given["config"], given["blocks"]
    routing = {name: getattr(config, name) for name in ("top_k", "router", "share", "sink_blocks", "recent_blocks")}
    single = dkv.route_blocks(given["q"], blocks, **routing)
    together = answers_of(found, ranks, index)
    for b in range(single.shape[0]):
        for h in range(single.shape[1]):
            picked = [
                worker.owned(case, rank)[n]
                for rank, each in enumerate(together)
                for n in each["chosen"][b, h].tolist()
                if n >= 0
            ]
            assert sorted(picked) == [n for n in single[b, h].tolist() if n >= 0]
    state = dkv.decode_attention(**given)
    tolerance = {"rtol": 2**-7, "atol": 2**-8} if state.out.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    for each in together:
        torch.testing.assert_close(each["out"], state.out, **tolerance)
        torch.testing.assert_close(each["lse"], state.lse, rtol=1e-5, atol=2e-6)
        assert torch.equal(each["out"], together[0]["out"]) and torch.equal(each["lse"], together[0]["lse"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_cases_hold_what_they_should(found, ranks):
    cases = worker.cases(ranks)
    assert any(0 in case["shards"] and any(case["shards"]) for case in cases)  # a rank without blocks
    index = next(index for index, case in enumerate(cases) if "neglected" in case)
    chosen = [each["chosen"] for each in answers_of(found, ranks, index)]
    assert (chosen[cases[index]["neglected"]] == -1).all() and (chosen[0] >= 0).any()


def test_a_shard_of_heads_attends_what_the_whole_attends(found):
    given = worker.inputs(worker.cases(4)[0] | {"heads": 8, "shards": [5]})
    expected = dkv.decode_attention(**given).out
    for rank in found:
        torch.testing.assert_close(rank["heads"]["out"], expected, rtol=1e-5, atol=2e-6)


def test_ranks_that_disagree_all_raise(found):
    named = ["q must be", "config must be", "softcap must be", "window_rank must be", "positions of all ranks"]
    named += ["positions must be", "block_indices must be"]
    for rank in found:
        assert len(rank["refusals"]) == len(named)
        for error, start in zip(rank["refusals"], named, strict=True):
            assert error.startswith(start)


def test_a_dead_rank_is_an_error_for_the_others(tmp_path):
    first, dead, last = run(tmp_path, 3, "death")
    assert dead is None
    for rank in (first, last):
        assert rank["death"].keys() == {"error", "seconds"}
        assert rank["death"]["seconds"] < worker.TIMEOUT.total_seconds() + 5  # the machine may be busy


def test_head_shards_are_views_and_checked():
    blocks = worker.inputs(worker.cases(2)[0] | {"shards": [2]})["blocks"]
    own = distributed.head_shard(blocks, 1, 3)
    assert own.num_kv_heads == 2 and own.u is blocks.u
    assert own.residual_k.data_ptr() == blocks.residual_k[:, :, 1].data_ptr()
    for start, stop, text in ((-1, 1, "start must be"), (1, 1, "stop must be"), (0, 4, "stop must be at most 3")):
        with pytest.raises(ValueError, match=text):
            distributed.head_shard(blocks, start, stop)


def test_bytes_do_not_depend_on_the_context(monkeypatch):
    sent = []

    def alone(x, group):
        sent[-1] += x.nbytes
        return [x]

    monkeypatch.setattr(distributed, "_all_gather", alone)
    monkeypatch.setattr(distributed.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda group: 1)
    for number in (5, 40):
        given = worker.inputs(worker.cases(2)[0] | {"shards": [number]})
        sent.append(0)
        state = distributed.decode_attention(**given)
        torch.testing.assert_close(state.out, dkv.decode_attention(**given).out, rtol=1e-5, atol=2e-6)
    assert sent[0] == sent[1] > 0


def test_what_no_group_can_take():
    cfg = dkv.DKVConfig(block_size=16, rank=4, num_residuals=5)
    k = np.random.default_rng(0).standard_normal((1, 2, 32, 8), np.float32)
    own, other = (dkv.compress_blocks(x, x, config=cfg) for x in (torch.from_numpy(k), k))
    q = torch.zeros(1, 2, 1, 8)
    for call, named in (
        (lambda: distributed.decode_attention(q.numpy(), own), "q must be of torch tensors, got ndarray"),
        (lambda: distributed.decode_attention(q, other), "blocks must be of torch tensors, got ndarray"),
        (lambda: distributed.route_blocks(q, own, positions=np.arange(2)), "positions must be of torch tensors"),
        (lambda: distributed.route_blocks(q, own, group="x"), "group must be a ProcessGroup or None, got str"),
    ):
        with pytest.raises(TypeError, match=named):
            call()
