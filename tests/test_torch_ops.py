"""The registered operators: schemas, fakes, mutation, and compiled graphs without a break."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from strategies import BACKENDS  # noqa: E402

import dkv  # noqa: E402
from dkv import testing  # noqa: E402
from dkv.integrations import torch_ops  # noqa: E402
from dkv.types import AttentionState, BlockFormat  # noqa: E402

OPS = [
    "compress_blocks",
    "reconstruct_blocks",
    "route_blocks",
    "lowrank_attention",
    "residual_attention",
    "exact_attention",
    "decode_attention",
    "merge_states",
    "prefill_attention",
]
MIXED = BlockFormat(8, 2, 7, key_bits=(8, 6, 5, 4, 3, 2, 1, 0), value_bits=3)
FORMATS = {
    "coded": BlockFormat(8, 3, 4),
    "mixed": MIXED,
    "exact": BlockFormat(8, 3, 3, factor_bits=16, residual_bits=16, minmax=True),
    "rank 0": BlockFormat(8, 0, 7),
    "no residuals": BlockFormat(8, 3, 0, factor_bits=32),
}
on_torch_backends = pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("torch", "triton")])


def made(fmt="coded", dtype="float32", q_len=1, transposed=False):
    inputs = testing.make_inputs(
        3, head_dim=16, head_dim_v=12, num_blocks=3, window=5, q_len=q_len, dtype=dtype, config=FORMATS[fmt]
    )
    inputs = testing.to_library(inputs, "torch")
    if transposed:
        inputs = inputs._replace(q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2))
    return inputs


def settings(op, inputs, backend="torch"):
    """Positional arguments of ``torch.ops.dkv.<op>``."""
    q, blocks, config = inputs.q, inputs.blocks, inputs.config
    packed = (torch_ops.pack_blocks(blocks), torch_ops.pack_format(blocks.format))
    chosen = torch.tensor([0, 2, -1], dtype=torch.int32).expand(q.shape[0], blocks.num_kv_heads, 3).contiguous()
    lens = torch.arange(q.shape[0]) + 3
    sink = torch.linspace(-1, 1, q.shape[1])
    rows = (inputs.k_window, inputs.v_window)
    if op == "compress_blocks":
        return (inputs.k, inputs.v, packed[1], "error", inputs.k[:, 0, :, 0].abs(), inputs.k[0, :, 0].abs(), backend)
    if op == "reconstruct_blocks":
        return (*packed, backend)
    if op == "route_blocks":
        return (q, *packed, 2, config.router, "kv_head", None, 1, 0, backend)
    if op in ("lowrank_attention", "residual_attention"):
        return (q, *packed, chosen, None, 20.0, backend)
    if op == "exact_attention":
        return (q, *rows, True, lens, 4, None, sink, 0.3, backend)
    if op.startswith("decode_attention"):
        return (q, *packed, *rows, None, lens, None, None, sink, None, 2, config.router, "all", 1, 0, backend)
    if op == "merge_states":
        states = [dkv.exact_attention(q, x, y) for x, y in (rows, (inputs.k, inputs.v))]
        return ([state.out for state in states], [state.lse for state in states], backend)
    return (q, inputs.k, inputs.v, None, 8, 4, 3, 2, None, 0.5, 0.9, None, sink, None, backend)


def tensors(x):
    return [x] if isinstance(x, torch.Tensor) else [part for each in x or () for part in tensors(each)]


def given(arguments):
    return [part for x in arguments if isinstance(x, (torch.Tensor, list, tuple)) for part in _given(x)]


def _given(x):
    if isinstance(x, torch.Tensor):
        return [x]
    return [part for part in x if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("op", OPS)
def test_i13_opcheck_of_transposed_queries(op):
    """pytorch#177115, vllm#58182, Primus-Turbo#362, cuEquivariance#223: a fake said the strides of its input."""
    torch.library.opcheck(getattr(torch.ops.dkv, op).default, settings(op, made(transposed=True, q_len=2)))


def test_opcheck_of_the_op_that_writes_to_its_arguments():
    inputs = made()
    state = dkv.decode_attention(inputs.q, inputs.blocks)
    out = {"into_out": torch.zeros_like(state.out), "into_lse": torch.zeros_like(state.lse)}
    torch.library.opcheck(torch.ops.dkv.decode_attention_out.default, settings("decode_attention", inputs), out)
    schema = torch.ops.dkv.decode_attention_out.default._schema
    assert {x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write} == {"into_out", "into_lse"}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fmt", FORMATS)
@on_torch_backends
def test_i13_fakes_say_what_the_ops_return(op, fmt, backend):
    """The same sources, stride by stride."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for transposed in (False, True):
        inputs = made(fmt, "bfloat16", 2, transposed)
        arguments = settings(op, inputs, backend)
        before = [x.clone() for x in given(arguments)]
        real = tensors(getattr(torch.ops.dkv, op)(*arguments))
        assert all(torch.equal(x, y) for x, y in zip(given(arguments), before, strict=True))
        owners = [x.untyped_storage().data_ptr() for x in (*given(arguments), *real) if x.numel()]
        assert len(set(owners)) == len(owners), "a result shares memory"
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [
                [part if part is None else mode.from_tensor(part) for part in x]
                if isinstance(x, list) and not isinstance(x[0], int)
                else mode.from_tensor(x)
                if isinstance(x, torch.Tensor)
                else x
                for x in arguments
            ]
            fake = tensors(getattr(torch.ops.dkv, op)(*fakes))
        for x, y in zip(real, fake, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@pytest.mark.parametrize("fmt", FORMATS)
@on_torch_backends
def test_the_functions_equal_the_public_ops(fmt, backend):
    inputs = made(fmt)
    q, blocks, config = inputs.q, inputs.blocks, inputs.config
    options = {"backend": backend}
    route = {"top_k": 2, "router": config.router}
    chosen = dkv.route_blocks(q, blocks, **route, **options)
    decode = (q, blocks, inputs.k_window, inputs.v_window)
    calls = {
        "reconstruct_blocks": ((blocks,), {}),
        "route_blocks": ((q, blocks), route),
        "lowrank_attention": ((q, blocks, chosen), {"softcap": 3.0}),
        "residual_attention": ((q, blocks, chosen), {"sm_scale": 0.2}),
        "exact_attention": ((q, inputs.k_window, inputs.v_window), {"window": 3, "lse_base": "2"}),
        "decode_attention": (decode, {"config": config}),
        "prefill_attention": ((q, inputs.k, inputs.v), {"config": dataclasses.replace(config, prefill_block=4)}),
    }
    for op, (arguments, extra) in calls.items():
        want = getattr(dkv, op)(*arguments, **extra, **options)
        got = getattr(torch_ops, op)(*arguments, **extra, **options)
        assert type(got) is type(want)
        assert all(torch.equal(x, y) for x, y in zip(tensors(got), tensors(want), strict=True)), op
    states = [dkv.exact_attention(q, inputs.k_window, inputs.v_window), dkv.exact_attention(q, inputs.k, inputs.v)]
    got, want = torch_ops.merge_states(states, **options), dkv.merge_states(states, **options)
    assert isinstance(got, AttentionState) and torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_compress_gives_the_same_blocks(fmt, dtype):
    inputs, stored = made(fmt, dtype), FORMATS[fmt]
    config = dkv.DKVConfig(
        block_size=8,
        rank=stored.rank,
        num_residuals=stored.num_residuals,
        format={8: "compact", 32: "fp32", 16: "bf16" if dtype == "bfloat16" else "fp16"}[stored.factor_bits],
        residual_bits=stored.residual_bits,
        key_bits=stored.key_bits,
        value_bits=stored.value_bits,
        router="minmax" if stored.minmax else "lowrank",
    )
    want = dkv.compress_blocks(inputs.k, inputs.v, config=config)
    got = torch_ops.compress_blocks(inputs.k, inputs.v, config=config)
    assert got.format == want.format == stored
    assert [name for name, _ in got.parts()] == [name for name, _ in want.parts()]
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(got.parts(), want.parts(), strict=True))


def test_packing_is_undone():
    from dkv.integrations import _registered

    for fmt in FORMATS.values():
        assert _registered.unpack_format(torch_ops.pack_format(fmt)) == fmt
    blocks = dataclasses.replace(made("mixed").blocks, block_counts=torch.tensor([3, 1], dtype=torch.int32))
    again = _registered.unpack_blocks(torch_ops.pack_blocks(blocks), torch_ops.pack_format(blocks.format))
    assert [name for name, _ in again.parts()] == [name for name, _ in blocks.parts()]
    with pytest.raises(ValueError, match="7 or 15"):
        _registered.unpack_format([1, 2])
    with pytest.raises(ValueError, match="parts"):
        _registered.unpack_blocks([blocks.anchor_k], torch_ops.pack_format(blocks.format))


@on_torch_backends
def test_a_decode_step_compiles_without_a_graph_break(backend):
    inputs = made(transposed=True)

    def step(q, blocks, k_window, v_window, seq_lens):
        chosen = torch_ops.route_blocks(q * 1.5, blocks, top_k=2, backend=backend)
        options = {"block_indices": chosen, "seq_lens": seq_lens, "backend": backend}
        state = torch_ops.decode_attention(q * 1.5, blocks, k_window, v_window, **options)
        return state.out * 2, state.lse

    lens = torch.tensor([5, 2])
    arguments = (inputs.q, inputs.blocks, inputs.k_window, inputs.v_window, lens)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(*arguments), step(*arguments), strict=True):
        assert torch.equal(x, y)
    explained = torch._dynamo.explain(step)(*arguments)
    assert explained.graph_break_count == 0 and explained.graph_count == 1


def test_compiled_with_inductor_and_longer_inputs():
    inputs = made()

    def step(q, blocks, k_window, v_window):  # nothing but views around the op: no C++ compiler is asked
        return torch_ops.decode_attention(q, blocks, k_window, v_window).out.mT

    compiled = torch.compile(step, fullgraph=True, backend="inductor", dynamic=True)
    for rows in (5, 4, 3):
        window = (inputs.k_window[:, :, :rows], inputs.v_window[:, :, :rows])
        torch.testing.assert_close(compiled(inputs.q, inputs.blocks, *window), step(inputs.q, inputs.blocks, *window))


def test_a_compiled_cache_step_compresses_and_merges():
    inputs = made("mixed")
    config = dkv.DKVConfig(block_size=8, rank=2, key_bits=(4,) * 4 + (2,) * 4)

    def step(q, k, v, k_window, v_window):
        blocks = torch_ops.compress_blocks(k, v, config=config)
        k_again, v_again = torch_ops.reconstruct_blocks(blocks)
        states = [torch_ops.exact_attention(q, k_again, v_again), torch_ops.exact_attention(q, k_window, v_window)]
        return torch_ops.merge_states(states), torch_ops.prefill_attention(q, k, v)

    arguments = (inputs.q, inputs.k, inputs.v, inputs.k_window, inputs.v_window)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(tensors(compiled), tensors(step(*arguments)), strict=True))


def test_out_is_written_in_place_also_when_compiled():
    inputs = made(transposed=True)
    arguments = (inputs.q, inputs.blocks, inputs.k_window, inputs.v_window)
    want = dkv.decode_attention(*arguments)

    def step(out, lse):
        torch_ops.decode_attention_out(*arguments, out=out, lse=lse)
        return out + 1

    for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        out = torch.full(want.out.shape[::-1], torch.nan).permute(3, 2, 1, 0)  # not contiguous
        lse = torch.full_like(want.lse, torch.nan)
        assert torch.equal(fn(out, lse), want.out + 1)
        assert torch.equal(out, want.out) and torch.equal(lse, want.lse)
    with pytest.raises(ValueError, match="lse must be torch.float32"):
        torch_ops.decode_attention_out(*arguments, out=out, lse=lse.double())


def test_bad_arguments_are_refused_as_by_the_public_ops():
    inputs = made()
    with pytest.raises(ValueError, match="seq_lens must be 0..5"):
        torch_ops.exact_attention(
            inputs.q, inputs.k_window, inputs.v_window, seq_lens=torch.full((inputs.q.shape[0],), 9)
        )
    with pytest.raises(ValueError, match="NaN or infinity in batch row 0, block 0"):
        torch_ops.compress_blocks(inputs.k * torch.nan, inputs.v, config=dkv.DKVConfig(block_size=8))
    with pytest.raises(ValueError, match="q must have shape"):
        torch_ops.route_blocks(inputs.q[..., :3], inputs.blocks)
    with pytest.raises(ValueError, match="backend must be one of"):
        torch_ops.merge_states([dkv.exact_attention(inputs.q, inputs.k, inputs.v)], backend="cuda")


def test_arguments_that_do_not_fit_one_another_are_refused():
    inputs = made()
    parts, format = settings("reconstruct_blocks", inputs)[:2]
    more_rows, wider = list(format), list(format)
    more_rows[2], wider[4] = 5, 5
    for wrong in (more_rows, wider):
        with pytest.raises(ValueError, match="blocks must fit their format"):
            torch.ops.dkv.reconstruct_blocks(parts, wrong, None)
    with pytest.raises(ValueError, match="blocks must hold anchor_k and anchor_v"):
        torch.ops.dkv.reconstruct_blocks([None] * len(parts), format, None)
    with pytest.raises(ValueError, match="at least one AttentionState"):
        torch.ops.dkv.merge_states([], [], None)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match="blocks must hold anchor_k and anchor_v"):
            torch.ops.dkv.reconstruct_blocks(parts[:1], format, None)
        with pytest.raises(ValueError, match="at least one AttentionState"):
            torch.ops.dkv.merge_states([], [], None)


def test_i14_a_clone_stays_another_tensor_when_it_is_written_to():
    """pytorch#132972, #198031: a clone was optimised away, and source and target of an operator became one tensor."""
    inputs = made()
    rows = (inputs.blocks, inputs.k_window, inputs.v_window)

    def step(x, q):
        y, lse = x.clone(), torch.zeros(x.shape[:3])
        torch_ops.decode_attention_out(q, *rows, out=y, lse=lse)
        return x + 1, y, lse

    x = torch.randn(dkv.decode_attention(inputs.q, *rows).out.shape)
    before = x.clone()
    want = step(x, inputs.q)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(one, other) for one, other in zip(compiled(x, inputs.q), want, strict=True))
    assert torch.equal(x, before) and torch.equal(want[0], x + 1) and not torch.equal(want[1], x)


def test_m05_d01_i11_registered_ops_take_views_empty_rows_and_empty_batches():
    """vllm#22003, flash-attention#2470, #1155, triton-ascend#984: strides, lengths of zero, and batches of zero."""
    inputs = made(q_len=2)
    rows = (inputs.k_window, inputs.v_window)
    states = [torch_ops.exact_attention(inputs.q, *rows), torch_ops.exact_attention(inputs.q, inputs.k, inputs.v)]
    views = [AttentionState(x.out, x.lse.transpose(1, 2).contiguous().transpose(1, 2)) for x in states]
    assert not views[0].lse.is_contiguous()
    for one, other in zip(torch_ops.merge_states(views), torch_ops.merge_states(states), strict=True):
        assert torch.equal(one, other)
    lens = torch.zeros(inputs.q.shape[0], dtype=torch.int32)
    state = torch_ops.exact_attention(inputs.q, *rows, seq_lens=lens)
    assert not state.out.any() and (state.lse == -torch.inf).all()
    empty = torch_ops.exact_attention(inputs.q[:0], *(x[:0] for x in rows))
    assert empty.out.shape == (0, *state.out.shape[1:]) and empty.lse.dtype == torch.float32


@pytest.mark.parametrize(("batch", "heads", "length", "head_dim"), [(2, 6, 1, 16), (1, 5, 3, 192)])
@on_torch_backends
def test_m07_d05_out_may_be_an_input_and_nothing_beside_it_is_written(backend, batch, heads, length, head_dim):
    """vllm#468, FlagGems#5235, flash-attention#2670: an output was read as an input again, or flat."""
    shape = {"batch": batch, "num_q_heads": heads, "num_kv_heads": 1 if heads == 5 else 2, "q_len": length}
    shape |= {"head_dim": head_dim, "head_dim_v": head_dim, "num_blocks": 2, "config": FORMATS["coded"]}
    inputs = testing.make_inputs(4, **shape, library="torch")
    rows = (inputs.blocks, inputs.k_window, inputs.v_window)
    want = dkv.decode_attention(inputs.q, *rows, backend=backend)
    buffer = torch.full((batch, length, heads, head_dim + 6), torch.nan)  # [B, Sq, Hq, D] and guards
    view = buffer[..., 3:-3].transpose(1, 2).copy_(inputs.q)
    lse = torch.empty_like(want.lse)
    torch_ops.decode_attention_out(view, *rows, out=view, lse=lse, backend=backend)
    torch.testing.assert_close((view, lse), tuple(want))
    assert buffer[..., :3].isnan().all() and buffer[..., -3:].isnan().all()
