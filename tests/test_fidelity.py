"""How faithful a cache is: the metrics and bytes by hand, the protocol on tiny models, and the command around it."""

import dataclasses
import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import dkv  # noqa: E402
from dkv.benches import fidelity, kvpress_peer, needle, peers  # noqa: E402
from dkv.benches.results import read_rows  # noqa: E402
from dkv.integrations.transformers import DKVCache, attach, detach  # noqa: E402

TOKENS = fidelity.SHORTEST
EXACT = dkv.DKVConfig(format="fp32", rank=4, block_size=64)
COARSE = dkv.DKVConfig(num_residuals=4, rank=1, block_size=64)


@pytest.fixture(scope="module")
def loud(tiny):
    """The tiny model with weights so large that what is far back matters, and its tokenizer."""
    from dkv import models

    model, tokenizer = models.load(tiny)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(20 if "q_proj" in name or "k_proj" in name else 10)
    return model, tokenizer


@pytest.fixture(scope="module")
def measured(loud):
    """One run with an exact, a coarse and a published variant, and the plain peers, by name."""
    variants = {
        "exact": EXACT,
        "coarse": COARSE,
        "paper": dkv.DKVConfig.paper(num_residuals=16),
    }
    plain = [peers.plain(bits) for bits in peers.PLAIN_BITS]
    before = loud[0].config._attn_implementation
    rows = fidelity.run(*loud, TOKENS, [0, 3000], trials=0, variants=variants, others=plain)
    assert loud[0].config._attn_implementation == before
    assert [row["kind"] for row in rows] == ["floor"] * 4 + ["dkv"] * 3 + ["peer"] * 4
    return {row["name"]: row for row in rows}


def _prefilled(model, ids):
    exact = dkv.DKVConfig(window=2 * len(ids))
    attach(model, exact)
    whole = DKVCache(model, exact)
    needle.feed(model, ids, whole, chunk=len(ids))
    return whole


# The protocol


def test_bit_exact_rows_are_the_dense_cache(measured):
    row = measured["exact"]
    assert abs(row["std_kl"]) < 1e-5 and abs(row["copy_kl"]) < 1e-5
    assert row["std_top1"] == row["copy_top1"] == 1
    assert measured["coarse"]["std_kl"] > 1e-3 and measured["coarse"]["copy_kl"] > 1e-3


def test_a_routed_variant_decodes_with_a_selection_at_each_step(loud, monkeypatch):
    monkeypatch.setattr(fidelity, "LENGTH", 20)
    lengths = []
    original = needle.logits

    def logits(model, ids, cache, keep=0):
        if keep == 0:
            lengths.append(ids.shape[1])
        return original(model, ids, cache, keep)

    monkeypatch.setattr(needle, "logits", logits)
    variants = {f"{top_k} blocks": dataclasses.replace(EXACT, top_k=5, chunk_top_k=top_k) for top_k in (12, 1)}
    rows = fidelity.run(*loud, TOKENS, [0], trials=0, variants=variants)
    assert lengths == [20] * 15 + [1] * 120
    every, one = rows[4:]
    assert abs(every["copy_kl"]) < 1e-4 and one["copy_kl"] > 1e-2


@pytest.mark.parametrize("metric", ["std_kl", "copy_kl"])
def test_fewer_bits_are_further_away(measured, metric):
    errors = [measured[f"int{bits}"][metric] for bits in (8, 4, 3, 2)]
    assert errors == sorted(errors) and errors[-1] > 30 * errors[0] > 0
    assert measured["drop the middle"][metric] > measured["int4"][metric]


def test_ratios_count_a_16_bit_cache(measured):
    middle, heads, dim = TOKENS - 512, 2, 8  # both layers alike
    for bits in (8, 4, 3, 2):
        stored = middle * heads * dim * 2 * bits / 8 + (middle // 64) * heads * dim * 4 + middle * heads * 4
        dense = middle * heads * dim * 4
        assert measured[f"int{bits}"]["ratio"] == pytest.approx(dense / stored, abs=1e-3)
        whole = (dense + 512 * heads * dim * 4) / (stored + 512 * heads * dim * 4)
        assert measured[f"int{bits}"]["whole_cache_ratio"] == pytest.approx(whole, abs=1e-3)
    assert [measured[f"keep newest 1/{share}"]["ratio"] for share in (2, 4, 6)] == [2, 4, 6]
    dropped = measured["drop the middle"]
    assert dropped["ratio"] is None and dropped["whole_cache_ratio"] == TOKENS / 512
    # a block of float16 rows and factors, by the layout's own arithmetic: anchor, u, both bases, rows and positions
    width, residuals, rank = heads * dim * 2, 16, 32
    block = 2 * (width + 256 * min(rank, width) + width * min(rank, width) + residuals * width) + residuals
    ratio = 2 * 256 * width / block
    assert measured["paper"]["ratio"] == pytest.approx(ratio, rel=0.02)  # a few scales more
    assert measured["exact"]["ratio"] < 1


def test_ratios_do_not_depend_on_the_dtype(measured, tiny):
    from dkv import models

    model, tokenizer = models.load(tiny, dtype="bfloat16")
    variants = {"coarse": COARSE, "paper": dkv.DKVConfig.paper(num_residuals=16), "exact": EXACT}
    rows = fidelity.run(model, tokenizer, TOKENS, [0], trials=0, variants=variants, others=[peers.plain(3)])
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    for row in rows:
        assert row["ratio"] == measured[row["name"]]["ratio"]
        assert row["std_kl_spread"] is None


def test_spread_is_the_standard_deviation_over_texts(loud, measured):
    alone = [
        {row["name"]: row for row in fidelity.run(*loud, TOKENS, [offset], trials=0, variants={"coarse": COARSE})}
        for offset in (0, 3000)
    ]
    for name in ("coarse", "drop the middle"):
        for metric in fidelity.METRICS:
            values = [rows[name][metric] for rows in alone]
            assert measured[name][metric] == pytest.approx(np.mean(values), rel=1e-4, abs=1e-6)
            assert measured[name][f"{metric}_spread"] == pytest.approx(np.std(values, ddof=1), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("share", [None, 4])
def test_dropped_rows_are_as_if_hidden_by_a_mask(loud, share):
    model, _ = loud
    ids = torch.randint(0, 256, (1, 900), generator=torch.Generator().manual_seed(1))
    first, last, end = 100, 300, 800
    whole = _prefilled(model, ids[0, :end].tolist())
    floor = peers.floors()[0 if share is None else 2]
    cache, _ = peers.stand_in(whole, first, last, floor)
    found = needle.logits(model, ids[:, end:], cache)
    detach(model)
    hidden = slice(first, end - last if share is None else 400)  # of 100..499 the newest 100 stay
    visible = torch.ones(900, 900, dtype=torch.bool).tril()
    visible[end:, hidden] = False
    with torch.inference_mode():
        expected = model(ids, attention_mask=visible[None, None], use_cache=False).logits[:, end:]
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    assert not torch.allclose(found, model(ids, use_cache=False).logits[:, end:], atol=0.1)


def test_a_branch_leaves_the_cache_alone(loud):
    model, _ = loud
    ids = list(range(200))
    whole = _prefilled(model, ids)
    for cache in (whole, peers.stand_in(whole, 10, 20)[0], peers.stand_in(whole, 10, 20, peers.floors()[1])[0]):
        twins = [peers.branch(cache) for _ in range(2)]
        first, again = (needle.logits(model, torch.tensor([[5, 6, 7]]), twin) for twin in twins)
        assert torch.equal(first, again)
        assert cache.get_seq_length() == 200 and twins[0].get_seq_length() == 203
    detach(model)


def test_layers_with_a_sliding_window_stay_as_they_are(tiny):
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = transformers.Gemma2Config(
        vocab_size=256, num_hidden_layers=2, sliding_window=100, max_position_embeddings=4096, **shape
    )
    model = transformers.Gemma2ForCausalLM(config).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    rows = fidelity.run(model, tokenizer, TOKENS, [0], trials=0, variants={"exact": EXACT}, others=[peers.plain(8)])
    found = {row["name"]: row for row in rows}
    assert abs(found["exact"]["copy_kl"]) < 1e-6
    assert found["int8"]["ratio"] == pytest.approx(32 / (16 + 4 * 8 / 64 + 4), abs=1e-3)


def test_passages(tiny):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    text = "".join(chr(33 + index % 90) for index in range(9000))
    ids = tokenizer(text).input_ids
    (passage,) = fidelity.passages(tokenizer, text, 7424, [5])
    assert passage.ids == ids[5:7429]
    assert passage.continuations == [ids[7429:7557], ids[2005:2133], ids[4905:5033]]
    for tokens in (TOKENS, 2048):
        (passage,) = fidelity.passages(tokenizer, text, tokens, [0])
        for copied in passage.continuations[1:]:
            starts = [at for at in range(256, tokens - 256 - 127) if passage.ids[at : at + 128] == copied]
            assert starts
    fidelity.passages(tokenizer, text, 2048, [9000 - 2048 - 128])
    with pytest.raises(ValueError, match="offset 6,825 needs 9,001 tokens of text, it has 9,000"):
        fidelity.passages(tokenizer, text, 2048, [0, 6825])
    for tokens in (0, 1024, 2000):
        with pytest.raises(ValueError, match="tokens must be a multiple of 256 and 1,280 or more"):
            fidelity.passages(tokenizer, text, tokens, [0])


def test_a_bos_token_goes_first(tiny):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert needle.first_tokens(tokenizer) == [bos]
    text = "0123456789" * 200
    (passage,) = fidelity.passages(tokenizer, text, TOKENS, [1])
    plain = needle.encode(tokenizer, text)
    assert passage.ids == [bos, *plain[1:1280]] and passage.continuations[0] == plain[1280:1408]


# The metrics


def test_divergence_by_hand():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 7)) * 3
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    kl, top1 = fidelity.divergence(torch.tensor(a), torch.tensor(b))
    assert kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-5)
    assert top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert fidelity.divergence(torch.tensor(a), torch.tensor(a) + 5)[0] == pytest.approx(0, abs=1e-6)


def test_copies_are_scored_from_the_17th_token_on():
    generator = torch.Generator().manual_seed(0)
    dense = [torch.randn(128, 9, generator=generator) for _ in range(3)]
    early = [each.clone() for each in dense]
    for each in early:
        each[:16] = each[:16].flip(-1)
    found = fidelity.divergences(dense, early)
    assert found["copy_kl"] == 0 and found["copy_top1"] == 1
    assert found["std_kl"] > 0 and found["std_top1"] < 1
    late = [dense[0], dense[1], dense[2].clone()]
    late[2][16:] = late[2][16:].flip(-1)
    kl, top1 = fidelity.divergence(dense[2][16:], late[2][16:])
    found = fidelity.divergences(dense, late)
    assert found["std_kl"] == 0 and found["copy_kl"] == pytest.approx(kl / 2)
    assert found["copy_top1"] == pytest.approx((1 + top1) / 2)


def test_recall_counts_what_the_dense_cache_knows(loud, monkeypatch):
    answers = iter(
        [False]  # the dense cache does not know the first passcode: nobody is asked for it
        + [True] + [False] * 4 + [True]
        + [True] + [False] * 4 + [False]
    )  # fmt: skip
    asked = []

    def ask(model, tokenizer, cache, code):
        asked.append((code, cache.get_seq_length()))
        if isinstance(cache, DKVCache):  # each step of the answer sees every block
            assert cache.config.top_k >= 12 and cache.compressed_nbytes > 0
        return SimpleNamespace(right=next(answers))

    monkeypatch.setattr(needle, "ask", ask)
    rows = fidelity.run(*loud, TOKENS, [0], trials=3, seed=7, variants={"coarse": dataclasses.replace(COARSE, top_k=1)})
    assert len(asked) == 13 and len({code for code, _ in asked}) == 3 and {length for _, length in asked} == {TOKENS}
    assert {(row["recall"], row["n"], row["trials"]) for row in rows[:4]} == {(0, 2, 3)}
    assert (rows[4]["name"], rows[4]["recall"], rows[4]["n"]) == ("coarse", 0.5, 2)


def test_a_block_size_that_does_not_fit_is_refused(loud):
    with pytest.raises(ValueError, match="variant 'odd' does not compress the same tokens"):
        fidelity.run(*loud, TOKENS, [0], trials=0, variants={"odd": dkv.DKVConfig(block_size=100)})
    assert loud[0].config._attn_implementation != "dkv"


# The peers


@given(st.integers(1, 8), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_packing(bits, count, seed):
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**bits, count, dtype=np.uint8))
    packed = peers.pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.nbytes == -(-count // 8) * bits
    assert torch.equal(peers.unpack(packed, bits, count), codes)


@pytest.mark.parametrize(("bits", "codes"), [(8, 4096), (4, 2048), (3, 1536), (2, 1024)])
def test_plain_quantisers_by_hand(bits, codes):
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(1, 2, 128, 16, generator=generator), torch.randn(1, 2, 128, 16, generator=generator)
    k[..., 3] *= 20  # a channel of its own scale
    v[0, 0, 5] = 0.25  # a row without spread
    stored = peers.plain(bits).store(k, v)
    # K: 2 heads, 2 groups, 16 channels; V: 2 heads, 128 rows; a float16 scale and a float16 minimum each
    assert stored.nbytes == 2 * codes + 2 * 2 * 16 * 4 + 2 * 128 * 4
    assert torch.equal(stored.v[0, 0, 5], v[0, 0, 5])
    for head, group, channel in ((0, 0, 3), (1, 1, 9)):
        rows = slice(64 * group, 64 * group + 64)
        _close_to_levels(k[0, head, rows, channel], stored.k[0, head, rows, channel], bits)
    for head, row in ((0, 4), (1, 127)):
        _close_to_levels(v[0, head, row], stored.v[0, head, row], bits)


def _close_to_levels(x, found, bits):
    low, high = float(x.min()), float(x.max())
    step = (high - low) / (2**bits - 1)
    expected = np.round((x.numpy() - low) / step) * step + low
    rounding = 2**-10 * max(abs(low), abs(high))  # of float16 minimum and scale
    assert np.abs(found.numpy() - x.numpy()).max() <= step / 2 + 2 * rounding
    assert (np.abs(found.numpy() - expected) <= 2 * rounding).mean() > 0.8
    assert len(set(found.tolist())) <= 2**bits


def test_every_peer_runs_or_says_why_not(loud, monkeypatch):
    model, _ = loud
    monkeypatch.setitem(sys.modules, "mlx.core", None)

    def broken(backend, config, bits):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(peers, "_transformers_peer", broken)
    found, skipped = peers.available(model)
    assert [peer.name for peer in found] == ["int8", "int4", "int3", "int2"]
    assert skipped[:2] == ["HF quanto: two lines", "HF hqq: two lines"]
    assert skipped[2].startswith("mlx-lm: ") and "mlx" in skipped[2]
    assert skipped[3].startswith("kvpress: ") and len(skipped) == 4


@pytest.mark.parametrize(
    ("package", "names", "bits"),
    [("optimum.quanto", "HF quanto", (4, 2)), ("hqq", "HF hqq", (4, 2)), ("mlx.core", "mlx-lm", (8, 4))],
)
def test_quantisers_of_other_packages(package, names, bits):
    pytest.importorskip(package)
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=2)
    model = SimpleNamespace(config=config, dtype=torch.float32, device=torch.device("cpu"))
    found = {peer.name: peer for peer in peers.available(model)[0]}
    k, v = torch.randn(1, 2, 128, 64), torch.randn(1, 2, 128, 64)
    for width, bound in zip(bits, (0.03, 0.5, 4)[bits[0] == 4 :]):
        stored = found[f"{names} int{width}"].store(k, v)
        assert stored.k.shape == k.shape and float((stored.k - k).abs().max()) < bound
        groups = 2 * 2 * 128 * 64 // 64
        assert stored.nbytes == 2 * 2 * 128 * 64 * width // 8 + groups * 4


# kvpress, as far as it goes without the package


def test_kept_rows():
    scores = torch.rand(3, 2, 1280, generator=torch.Generator().manual_seed(0))
    scores[0] += 10
    for among, ratio in (("head", 4), ("layer", 6), ("model", 3)):
        kept = kvpress_peer.kept_rows(scores, ratio, among)
        assert bool(kept[..., :256].all() and kept[..., -256:].all())
        middle = kept[..., 256:-256]
        axes = {"head": (2,), "layer": (1, 2), "model": (0, 1, 2)}[among]
        counts = middle.sum(axes)
        assert bool((counts == round(middle.numel() / counts.numel() / ratio)).all())
        chosen = scores[..., 256:-256]
        assert float(chosen[middle].sum()) == pytest.approx(
            float(chosen.flatten(-len(axes)).topk(int(counts.flatten()[0]), dim=-1).values.sum()), rel=1e-5
        )
    assert not bool(middle[1:].any())  # in the model's one budget, the first layer's scores win


def test_kept_rows_are_all_that_attention_sees():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, rows, 8, generator=generator) for heads, rows in ((4, 3), (2, 13), (2, 13)))
    kept = torch.rand(2, 10, generator=generator) > 0.5
    module = SimpleNamespace(_dkv_kept=kept, num_key_value_groups=2, is_causal=True, training=False)
    found, _ = kvpress_peer.attention(module, q, k, v, None, dropout=0.0, scaling=8**-0.5)
    for head in range(4):
        for row in range(3):
            seen = torch.cat([kept[head // 2], torch.arange(3) <= row])
            keys, values = k[0, head // 2, seen], v[0, head // 2, seen]
            weight = (keys @ q[0, head, row] * 8**-0.5).softmax(0)
            torch.testing.assert_close(found[0, row, head], weight @ values, atol=1e-5, rtol=1e-4)


def test_kvpress_is_asked_for_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(SystemExit) as caught:
        kvpress_peer.main([])
    assert caught.value.code == 2
    assert "needs an environment of its own" in capsys.readouterr().err


# The command


def _dkv(*arguments):
    pytest.importorskip("typer")
    from dkv.cli import main

    return main(["fidelity", *map(str, arguments)])


KEYS = {"name", "ratio", "whole_cache_ratio", "std_kl", "std_top1", "copy_kl", "copy_top1", "recall", "n"}


def test_the_command(tiny, tmp_path, capsys):
    file = tmp_path / "fidelity.json"
    options = ["--model", tiny, "--tokens", TOKENS, "--offsets", "0,5000", "--trials", 1, "--json", file]
    if importlib.util.find_spec("matplotlib") is not None:
        options += ["--plot", tmp_path / "plot.png"]
    assert _dkv(*options) == 0
    if "--plot" in options:
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    rows = read_rows(file)
    names = [row["name"] for row in rows]
    assert names[:4] == ["drop the middle", "keep newest 1/2", "keep newest 1/4", "keep newest 1/6"]
    assert names[4:7] == list(fidelity.default_variants(None)) and names[7:11] == ["int8", "int4", "int3", "int2"]
    for row in rows:
        assert set(row) >= KEYS
        assert (row["tokens"], row["offsets"], row["trials"], row["dtype"]) == (TOKENS, [0, 5000], 1, "float32")
        assert row["recall"] is None and row["n"] == 0  # random weights know no passcode
    assert (
        "Mean of 2 texts" in printed
        and "Not measured: kvpress" in printed
        and "±" in printed
        and "16-bit cache" in printed
    )


def test_the_command_with_a_text_fewer_variants_and_more_rows(tiny, tmp_path, capsys):
    text, first, second = tmp_path / "text", tmp_path / "first.json", tmp_path / "second.json"
    text.write_text("All work and no play makes a text. " * 60, encoding="utf-8")
    options = ["--model", tiny, "--tokens", TOKENS, "--offsets", "17", "--trials", 0, "--no-peers"]
    assert _dkv(*options, "--text", text, "--variants", "paper R=64, default", "--json", first) == 0
    rows = read_rows(first)
    assert [row["name"] for row in rows[4:]] == ["paper R=64", "default"]
    printed = capsys.readouterr().out
    assert "Not measured" not in printed and "One text" in printed and "±" not in printed
    rows[0]["name"] = "from elsewhere"
    first.write_text(json.dumps(rows))
    assert _dkv(*options, "--text", text, "--variants", "default", "--add", first, "--json", second) == 0
    assert "elsewhere" in capsys.readouterr().out
    assert read_rows(second)[5:] == rows
    assert _dkv(*options[:-3], "--trials", 0, "--offsets", "18", "--add", first) == 2
    assert "'from elsewhere' was measured with 1280 tokens at offsets [17]" in capsys.readouterr().err


def test_a_plot_is_written(measured, tmp_path):
    pytest.importorskip("matplotlib")
    from dkv.benches import plots

    plots.fidelity(list(measured.values()), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    for name in measured:
        assert drawn.count(f"<!-- {name} -->") == 2, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offsets", "0,x"], "--offsets must be integers"),
        (["--offsets", "0,-1"], "--offsets must be 0 or more, got -1"),
        (["--offsets", "5,5"], "--offsets must differ"),
        (["--trials", "-1"], "--trials must be 0 or more, got -1"),
        (["--dtype", "int8"], "--dtype must be one of"),
        (["--text", "no-such-file"], "cannot read no-such-file: No such file"),
        (["--json", "no/such/x.json"], "cannot write no/such/x.json"),
        (["--plot", "no/such/x.png"], "cannot write no/such/x.png"),
        (["--plot", "x.txt"], "--plot must end in .png, .svg or .pdf"),
        (["--add", "no-such-file"], "cannot read no-such-file"),
        (["--add", __file__], "is not JSON"),
        (["--tokens", "4096"], "more than the model's context of 4096 tokens"),
        (["--tokens", "1300"], "tokens must be a multiple of 256 and 1,280 or more, got 1,300"),
        (["--tokens", "1280", "--offsets", "99000000"], "offset 99,000,000 needs 99,001,408 tokens of text"),
        (["--tokens", "1280", "--variants", "default,nope"], "--variants: unknown 'nope'; known are paper R=128"),
    ],
)
def test_bad_input(arguments, message, tiny, capsys, monkeypatch):
    monkeypatch.setattr(fidelity, "run", lambda *args, **options: pytest.fail("something long ran"))
    assert _dkv("--model", tiny, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert message in printed.err


def test_bad_files(tiny, tmp_path, capsys):
    from dkv.cli.fidelity import NEEDED

    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("short")
    (tmp_path / "rows.json").write_text('[{"name": "x"}]')
    (tmp_path / "words.json").write_text(json.dumps([dict.fromkeys(NEEDED, "x")]))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for option, name, message in (
        ("--text", "bytes", "is not UTF-8 text"),
        ("--text", "short", "tokens of text, it has 5"),
        ("--add", "rows.json", "does not hold rows of dkv fidelity"),
        ("--add", "words.json", "does not hold rows of dkv fidelity"),
        ("--add", "deep.json", "is not JSON"),
    ):
        assert _dkv("--model", tiny, "--tokens", TOKENS, option, tmp_path / name) == 2
        assert message in capsys.readouterr().err


def test_a_missing_matplotlib_names_the_extra(tiny, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    assert _dkv("--model", tiny, "--plot", tmp_path / "x.png") == 2
    assert 'matplotlib: pip install "dkv[plot]"' in capsys.readouterr().err
