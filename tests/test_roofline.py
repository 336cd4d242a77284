"""The counts of bytes are those of the kernels: by hand, and by what the interpreter loads and stores."""

import contextlib
import dataclasses
import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("rich")
pytest.importorskip("dkv.kernels.triton.decode")
pytest.importorskip("dkv.kernels.triton.route")

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from bench import roofline  # noqa: E402
from bench.launches import FITTED, Geometry, launches, recorded  # noqa: E402
from bench.traffic import KERNELS, traffic  # noqa: E402
from dkv import testing  # noqa: E402
from dkv.benches.results import read_rows  # noqa: E402
from dkv.kernels.triton import _launch, decode, merge, route  # noqa: E402
from dkv.kernels.triton._select import Pins, select_scores  # noqa: E402
from dkv.types import BlockFormat  # noqa: E402

CODED = BlockFormat(32, 4, 31)
FORMATS = {
    "every row": CODED,
    "some rows": BlockFormat(32, 4, 9),
    "mixed": BlockFormat(32, 0, 31, key_bits=(4, 3, 2, 2, 2, 1, 1, 0), value_bits=3),
    "exact": BlockFormat(32, 4, 9, factor_bits=16, residual_bits=16, minmax=True),
    "anchors": BlockFormat(32, 0, 0),
}


@contextlib.contextmanager
def watched(monkeypatch):
    """Bytes of distinct addresses that each program loads and stores, and of all distinct loads, by launch."""
    from triton.runtime import interpreter

    builder, seen = interpreter.interpreter_builder, []
    load, store = builder.create_masked_load, builder.create_masked_store
    run = _launch.launch

    def note(kind, ptrs, mask):
        step = ptrs.get_element_ty().primitive_bitwidth // 8
        places = ptrs.data[mask.data.astype(bool)].reshape(-1)
        seen[-1][kind].setdefault((builder.grid_idx, step), set()).update(places.tolist())

    def loading(ptrs, mask, *rest):
        note("load", ptrs, mask)
        return load(ptrs, mask, *rest)

    def storing(ptrs, value, mask, *rest):
        note("store", ptrs, mask)
        return store(ptrs, value, mask, *rest)

    def launching(kernel, *arguments, **options):
        seen.append({"name": kernel.fn.__name__, "load": {}, "store": {}})
        run(kernel, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", loading)
        patch.setattr(builder, "create_masked_store", storing)
        for module in (decode, merge, route, sys.modules[route.select_scores.__module__]):
            patch.setattr(module, "launch", launching)
        yield seen


def bytes_of(places):
    return sum(step * len(each) for (_, step), each in places.items())


def distinct(places):
    return sum({(place, step): step for (_, step), each in places.items() for place in each}.values())


@pytest.mark.skipif(not _launch.INTERPRETED, reason="TRITON_INTERPRET=1 shows what kernels load")
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("router", ["lowrank", "keys", "residual", "minmax"])
def test_counts_are_what_the_interpreter_loads(monkeypatch, fmt, router):
    stored = FORMATS[fmt]
    if router == "minmax" and not stored.minmax:
        pytest.skip("no extremes are stored")
    shape = {"batch": 2, "num_kv_heads": 2, "head_dim": 24, "head_dim_v": 16, "num_blocks": 3, "window": 40}
    inputs = testing.make_inputs(5, num_q_heads=6, **shape, dtype="float16", config=stored, library="torch")
    ragged = router == "residual"
    settings = {"group": 3, "dtype": "fp16", "format": stored, "top_k": 2, "router": router}
    g = Geometry(**shape, **settings, ragged=ragged, sink=ragged)
    blocks, lens, sink = inputs.blocks, None, None
    if ragged:
        blocks = dataclasses.replace(blocks, block_counts=torch.tensor([3, 3], dtype=torch.int32))
        lens, sink = torch.tensor([40, 40], dtype=torch.int32), torch.linspace(0, 1, 6)
    with watched(monkeypatch) as seen:
        scale = 24**-0.5
        chosen = route.route_blocks(inputs.q, blocks, 2, router, "kv_head", scale, 1, 0)
        rows = (inputs.k_window, inputs.v_window)
        decode.decode_attention(inputs.q, blocks, *rows, chosen, lens, None, None, sink, scale)
    expected = [*launches("route_blocks", g), *launches("decode_attention", g)]
    assert [each["name"] for each in seen] == [launch.name for launch in expected]
    for each, launch in zip(seen, expected, strict=True):
        made = traffic(launch)
        assert made.all_reads == bytes_of(each["load"]), (launch.name, made.reads)
        assert made.writes == distinct(each["store"]), launch.name
        if launch.name != "attend":  # heads that choose the same blocks share parts of them
            assert made.unique_reads == distinct(each["load"]), (launch.name, made.unique)


@pytest.mark.skipif(not _launch.INTERPRETED, reason="TRITON_INTERPRET=1 shows what kernels load")
def test_counts_of_a_selection_in_tiles(monkeypatch):
    scores = torch.linspace(-1, 1, 2 * 2 * 3 * 9000).view(2, 2, 3, 9000)
    counts = torch.tensor([9000], dtype=torch.int32)

    def select(device):
        return select_scores(scores.to(device), counts.to(device), 2, 1, Pins(4, 1), 4)

    with watched(monkeypatch) as seen:
        select("cpu")
    expected = recorded("route_blocks", lambda: select("meta"))
    assert [each["name"] for each in seen] == [launch.name for launch in expected] and len(seen) == 3
    for each, launch in zip(seen, expected, strict=True):
        made = traffic(launch)
        assert made.all_reads == bytes_of(each["load"]), (launch.name, made.reads)
        assert made.unique_reads == distinct(each["load"]) and made.writes == distinct(each["store"]), launch.name


def test_a_tiny_case_by_hand():
    """One sequence, one kv head of 2 query heads, two blocks of 16 rows of 4 bits, a window of 16 rows; float16."""
    g = Geometry(1, 1, 2, head_dim=16, num_blocks=2, window=16, dtype="fp16", format=BlockFormat(16, 0, 15), top_k=1)
    attend, merged = (traffic(launch) for launch in launches("decode_attention", g))
    codes, scales = 15 * 8, 16 * 2 * 2 + 4  # a row of 16 codes is 8 bytes; scale and minimum of one group, and a unit
    assert attend.reads == {
        "q": 2 * 16 * 2 * 2,  # 2 rows of 16 float16, by the programs of the slot and of the window
        "indices": 4,
        "anchors": 2 * 16 * 2,
        "rows": 2 * codes,
        "scales": 2 * scales,
        "window": 16 * 2 * 16 * 2,
    }
    assert attend.unique_reads == attend.all_reads - 2 * 16 * 2
    assert attend.writes == 2 * 2 * (16 + 1) * 4  # two partial states of 2 rows, float32
    assert merged.reads == {"states": attend.writes} and merged.writes == 2 * (16 * 2 + 4)


def test_the_router_reads_shared_factors_once_a_program():
    g = Geometry(8, 8, 4, num_blocks=256, format=BlockFormat())
    score = traffic(launches("route_blocks", g)[0])
    factors = 8 * 256 * (256 * 32 + 256 * 2 + 4 + 32 * 4 + 8 * 32 * 128)  # u and its scales once for 8 heads
    assert score.unique["factors"] == score.reads["factors"] == factors
    few = traffic(launches("route_blocks", Geometry(1, 8, 4, num_blocks=64))[0])
    assert few.unique["factors"] < few.reads["factors"]


def test_a_step_at_64k_reads_ten_times_less_than_dense():
    made = roofline.row("default", 65536, 8, 8)
    assert made["dense_reads"] == 8 * 8 * (65536 * 2 * 128 * 2 + 4 * 128 * 2)
    assert made["reads_ratio"] >= 10 and made["unique_ratio"] >= made["reads_ratio"]
    assert made["all_reads"] == sum(sum(kernel["reads"].values()) for kernel in made["kernels"])
    for times in made["times"].values():
        assert times["us"] >= times["floor_us"] == 5 * len(made["kernels"])


def test_every_kernel_of_a_step_has_a_count():
    names = set()
    for count in (1, 300, 70000):
        for router in ("lowrank", "keys", "residual"):
            for group, length in ((1, 1), (16, 16)):
                shape = {"num_blocks": count, "router": router, "group": group, "q_len": length}
                names |= {launch.name for launch in launches("route_blocks", Geometry(**shape))}
    names |= {
        launch.name for launch in launches("route_blocks", Geometry(format=BlockFormat(minmax=True), router="minmax"))
    }
    names |= {launch.name for launch in launches("decode_attention", Geometry(format=FITTED, ragged=True, sink=True))}
    assert names <= set(KERNELS)


def test_the_bench_prints_and_writes(tmp_path, capsys):
    file = tmp_path / "roofline.json"
    assert roofline.main(["--json", str(file), "--contexts", "4096", "--batches", "1", "--devices", "H200"]) == 0
    rows = read_rows(file)
    assert len(rows) == len(roofline.PRESETS) * len(roofline.KV_HEADS)
    assert "4,096" in capsys.readouterr().out and os.path.getsize(file) > 100
