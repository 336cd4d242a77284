"""The constructed transformer copies what attention reaches, dense or compressed, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import dkv  # noqa: E402
from dkv.benches import induction, needle  # noqa: E402
from dkv.integrations.transformers import DKVCache, attach, detach  # noqa: E402

CONFIG = dkv.DKVConfig(block_size=128, window=256, sink_tokens=32, rank=16, top_k=3)
TOKENS = 2300  # 32 sink tokens, 15 blocks, 348 exact ones


@pytest.fixture(scope="module")
def network():
    return induction.model()


@pytest.fixture(scope="module")
def text():
    return induction.haystack(TOKENS, 3, CONFIG.sink_tokens, CONFIG.window + CONFIG.block_size)


@pytest.fixture(scope="module")
def read(network, text):
    return induction.compressed(network, text[0], CONFIG)


@pytest.mark.parametrize("every", [1, 8])
def test_passcodes_come_back_from_a_routed_cache(network, text, read, every):
    assert [layer.block_counts for layer in read.dkv_layers] == [[15], [15]]
    read.configure(dataclasses.replace(CONFIG, router="keys", route_every=every))
    assert induction.recalled(network, read, text[1]) == induction.PASSCODES
    assert read.get_seq_length() == TOKENS


def test_passcodes_are_forgotten_where_attention_does_not_reach(network, text, read):
    read.configure(dataclasses.replace(CONFIG, top_k=1, recent_blocks=1))
    assert induction.recalled(network, read, text[1][: induction.PASSCODES - 1]) == 0


def test_the_dense_cache_recalls_them_and_is_dense(network, text):
    detach(network)
    ids, passcodes = text
    cache = induction.dense(network, ids)
    whole = needle.dense_cache(network)
    needle.feed(network, ids, whole, chunk=TOKENS)
    for layer, other in zip(cache.layers, whole.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(layer.values, other.values, rtol=0, atol=1e-4)
    assert induction.recalled(network, cache, passcodes) == induction.PASSCODES


def test_every_token_of_a_repeated_text_is_predicted(network):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, induction.FILLER, (1, 90), generator=generator).repeat(1, 2)
    detach(network)
    with torch.no_grad():
        said = network(ids).logits.argmax(-1)
    assert torch.equal(said[0, 92:-1], ids[0, 93:])


def test_a_cache_holds_what_the_table_says(network, read):
    H, D, S, r, Q = 1, 3 * induction.CODE, CONFIG.block_size, CONFIG.rank, 1
    kept = S - 1
    block = 2 * H * D * 4 + S * r + 4 + 2 * S + H * r * D + 4 * r  # anchors, u, its unit and scales, basis, its scales
    block += 2 * (H * kept * D // 2 + 2 * H * Q * D * 2 + H * 4)  # coded rows of K and V, scales and minima, units
    rows = sum(layer.k_rows.shape[2] for layer in read.dkv_layers)
    exact = rows * 2 * H * D * 4
    assert read.nbytes == induction.table_bytes(read) == 2 * 15 * block + exact
    assert rows <= 2 * (CONFIG.sink_tokens + CONFIG.window + 2 * CONFIG.block_size)


def test_a_chunk_whose_blocks_are_all_pinned_scores_none(network, monkeypatch):
    from dkv.kernels.torch import route

    def refuse(*args):
        raise AssertionError("scored")

    monkeypatch.setattr(route, "route_scores", refuse)
    q, blocks = torch.randn(2, 4, 3, 24), _blocks()
    for sinks, recent, wanted in ((1, 1, [0, 4]), (3, 0, [0, 1, 2]), (0, 2, [3, 4])):
        chosen = dkv.route_blocks(q, blocks, top_k=len(wanted), sink_blocks=sinks, recent_blocks=recent)
        assert chosen.tolist() == [[wanted] * 2] * 2


def _blocks():
    k, v = torch.randn(2, 2, 80, 24), torch.randn(2, 2, 80, 20)
    return dkv.compress_blocks(k, v, config=dkv.DKVConfig(block_size=16, rank=3))


def test_a_text_too_short_is_refused():
    with pytest.raises(ValueError, match="context must be 352 or more, got 351"):
        induction.haystack(351, 0, 32, 256)


def test_codes_differ():
    codes = induction.token_codes()
    alike = (codes @ codes.T / induction.CODE).fill_diagonal_(-1)
    assert float(alike.max()) < 0.6


def test_rows_of_a_run(network, monkeypatch):
    monkeypatch.setattr(induction, "PASSCODES", 2)
    rows = induction.run([900], config=CONFIG, routers=("keys",))
    assert [(row["variant"], row["right"], row["asked"]) for row in rows] == [("dense", 2, 2), ("keys", 2, 2)]
    assert rows[1]["blocks"] == 4 and rows[1]["cache_bytes"] == rows[1]["table_bytes"]
    assert all(row["peak_bytes"] >= row["start_bytes"] > 0 for row in rows)
    attach(network, CONFIG)
    assert DKVCache(network).nbytes == 0
