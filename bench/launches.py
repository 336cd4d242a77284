"""What the Triton launchers start for a geometry, on meta tensors: kernels, grids, arguments and options."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dkv.integrations import torch_ops
from dkv.kernels.triton import _launch
from dkv.types import BlockFormat, CompressedBlocks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FITTED = BlockFormat(rank=0, key_bits=(4, 3, 2, 2, 2, 1, 1, 0), value_bits=2)  # of the kind that a ratio of 6 chooses
DECODE_OPS = ("route_blocks", "lowrank_attention", "residual_attention", "exact_attention", "decode_attention")


class Launch(NamedTuple):
    """One start of a kernel; ``arguments`` are positional, ``options`` hold constexprs, num_warps and num_stages."""

    op: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def bound(self) -> dict[str, Any]:
        """Arguments and constants by the names that the kernel gives them."""
        return dict(zip(inspect.signature(self.kernel.fn).parameters, self.arguments)) | self.options


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Shapes and settings of one attention layer and its cache."""

    batch: int = 1
    num_kv_heads: int = 2
    group: int = 4
    q_len: int = 1
    head_dim: int = 128
    head_dim_v: int | None = None
    num_blocks: int = 64
    window: int = 1280
    dtype: str = "bf16"
    format: BlockFormat = dataclasses.field(default_factory=BlockFormat)
    top_k: int = 16
    router: str = "lowrank"
    share: str = "kv_head"
    ragged: bool = False
    softcap: float | None = None
    sink: bool = False
    tokens: int = 4096

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or DTYPES[self.dtype], device="meta")

    def rows(self, tokens: int) -> tuple[Tensor, Tensor]:
        shape = (self.batch, self.num_kv_heads, tokens)
        return self.tensor(*shape, self.head_dim), self.tensor(*shape, self.dim_v)

    def queries(self, length: int | None = None) -> Tensor:
        heads = self.num_kv_heads * self.group
        return self.tensor(self.batch, heads, self.q_len if length is None else length, self.head_dim)

    def blocks(self) -> CompressedBlocks:
        rows = self.rows(self.num_blocks * self.format.block_size)
        made = torch.ops.dkv.compress_blocks(*rows, torch_ops.pack_format(self.format), "distinct", None, None)
        heads, dim, dim_v = self.num_kv_heads, self.head_dim, self.dim_v
        names = torch_ops.stored_parts(self.format, self.format.stored_rank(heads, dim, dim_v))
        counts = self.tensor(self.batch, dtype=torch.int32) if self.ragged else None
        return CompressedBlocks(format=self.format, block_counts=counts, **dict(zip(names, made)))

    def lens(self) -> Tensor | None:
        return self.tensor(self.batch, dtype=torch.int32) if self.ragged else None

    def sinks(self) -> Tensor | None:
        return self.tensor(self.num_kv_heads * self.group, dtype=torch.float32) if self.sink else None

    def indices(self) -> Tensor:
        width = min(self.top_k, self.num_blocks)
        return self.tensor(self.batch, self.num_kv_heads, width, dtype=torch.int32)


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[Any, ...]]]:
    """Collects launches instead of running them."""
    seen: list[tuple[Any, ...]] = []
    before = _launch.recorder
    _launch.recorder = lambda *launch: seen.append(launch)
    try:
        yield seen
    finally:
        _launch.recorder = before


def recorded(op: str, call: Callable[[], Any]) -> list[Launch]:
    with recording() as seen:
        call()
    return [Launch(op, *launch) for launch in seen]


def _route(g: Geometry) -> None:
    from dkv.kernels.triton import route

    scale = g.head_dim**-0.5
    route.route_blocks(g.queries(), g.blocks(), g.top_k, g.router, g.share, scale, 1, 0)


def _of_blocks(name: str) -> Callable[[Geometry], None]:
    def run(g: Geometry) -> None:
        from dkv.kernels.triton import decode

        getattr(decode, name)(g.queries(), g.blocks(), g.indices(), g.head_dim**-0.5, g.softcap)

    return run


def _exact(g: Geometry) -> None:
    from dkv.kernels.triton import decode

    k, v = g.rows(g.window)
    decode.exact_attention(g.queries(), k, v, True, g.lens(), None, g.softcap, g.sinks(), g.head_dim**-0.5)


def _decode(g: Geometry) -> None:
    from dkv.kernels.triton import decode

    settings = (g.indices(), g.lens(), None, g.softcap, g.sinks(), g.head_dim**-0.5)
    decode.decode_attention(g.queries(), g.blocks(), *g.rows(g.window), *settings)


def _merge(g: Geometry) -> None:
    from dkv.kernels.triton import merge

    q = g.queries()
    outs = [g.tensor(*q.shape[:3], g.dim_v) for _ in range(3)]
    merge.merge_states(outs, [g.tensor(*q.shape[:3], dtype=torch.float32) for _ in range(3)])


def _compress(g: Geometry) -> None:
    from dkv.kernels.triton import compress

    rows = g.rows(g.num_blocks * g.format.block_size)
    compress.compress_blocks(*rows, g.format, "error" if g.format.exact_rows else "distinct", None)


def _reconstruct(g: Geometry) -> None:
    from dkv.kernels.triton import compress

    compress.reconstruct_blocks(g.blocks())


def _prefill(g: Geometry) -> None:
    from dkv.kernels.triton import prefill

    q, (k, v), scale = g.queries(g.tokens), g.rows(g.tokens), g.head_dim**-0.5
    chosen = prefill.select_key_blocks(q, k, g.format.block_size, 128, 16, 512, scale, 32, 1.0, 1.0)
    prefill.prefill_attention(q, k, v, chosen, g.format.block_size, 128, g.softcap, g.sinks(), scale)


OPS: dict[str, Callable[[Geometry], None]] = {
    "route_blocks": _route,
    "lowrank_attention": _of_blocks("lowrank_attention"),
    "residual_attention": _of_blocks("residual_attention"),
    "exact_attention": _exact,
    "decode_attention": _decode,
    "merge_states": _merge,
    "compress_blocks": _compress,
    "reconstruct_blocks": _reconstruct,
    "prefill_attention": _prefill,
}


def launches(op: str, geometry: Geometry) -> list[Launch]:
    """What one call of the op starts."""
    return recorded(op, lambda: OPS[op](geometry))


def decode_step(geometry: Geometry) -> list[Launch]:
    """A routed decode step: the router, then attention."""
    return [*launches("route_blocks", geometry), *launches("decode_attention", geometry)]
