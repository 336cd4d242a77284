"""Host time of one call: ``torch.ops.dkv.*`` beside the public function and the backend's own, on a tiny cache."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.integrations import torch_ops


def calls(device: str, backend: str) -> dict[str, dict[str, Callable[[], Any]]]:
    """``op -> what is called -> a call``."""
    inputs = testing.to_library(testing.make_inputs(0, head_dim=16, head_dim_v=16, num_blocks=2), "torch", device)
    q, blocks, k, v, scale = inputs.q, inputs.blocks, inputs.k_window, inputs.v_window, 0.25
    chosen = dkv.route_blocks(q, blocks, top_k=2, backend=backend)
    packed = (torch_ops.pack_blocks(blocks), torch_ops.pack_format(blocks.format))
    route, decode = op_module(backend, "route"), op_module(backend, "decode")
    registered, options = torch.ops.dkv, {"sm_scale": scale, "backend": backend}
    routing = (2, "lowrank", "kv_head")
    unset, rest = (None,) * 4, (16, "lowrank", "kv_head", 1, 0, backend)
    return {
        "route_blocks": {
            "backend": lambda: route.route_blocks(q, blocks, *routing, scale, 1, 0),
            "dkv": lambda: dkv.route_blocks(q, blocks, top_k=2, **options),
            "torch.ops.dkv": lambda: registered.route_blocks(q, *packed, *routing, scale, 1, 0, backend),
            "torch_ops": lambda: torch_ops.route_blocks(q, blocks, top_k=2, **options),
        },
        "decode_attention": {
            "backend": lambda: decode.decode_attention(q, blocks, k, v, chosen, *unset, scale),
            "dkv": lambda: dkv.decode_attention(q, blocks, k, v, block_indices=chosen, **options),
            "torch.ops.dkv": lambda: registered.decode_attention(q, *packed, k, v, chosen, *unset, scale, *rest),
            "torch_ops": lambda: torch_ops.decode_attention(q, blocks, k, v, block_indices=chosen, **options),
        },
        "exact_attention": {
            "backend": lambda: decode.exact_attention(q, k, v, True, None, None, None, None, scale),
            "dkv": lambda: dkv.exact_attention(q, k, v, **options),
            "torch.ops.dkv": lambda: registered.exact_attention(q, k, v, True, *unset, scale, backend),
            "torch_ops": lambda: torch_ops.exact_attention(q, k, v, **options),
        },
    }


def run(device: str = "cpu", backend: str | None = None, seconds: float = 1.0) -> list[dict[str, Any]]:
    """One row per op: median microseconds of each kind of call, taking turns. Nothing waits for a GPU within a call."""
    backend = backend or ("triton" if device.startswith("cuda") else "torch")
    rows = []
    with torch.inference_mode():
        for op, kinds in calls(device, backend).items():
            times: dict[str, list[float]] = {name: [] for name in kinds}
            stop = time.perf_counter() + seconds
            while time.perf_counter() < stop or len(next(iter(times.values()))) < 5:
                for name, call in kinds.items():
                    if device.startswith("cuda"):
                        torch.cuda.synchronize()
                    start = time.perf_counter()
                    call()
                    times[name].append(1e6 * (time.perf_counter() - start))
            medians = {name: round(statistics.median(each), 1) for name, each in times.items()}
            rows.append({"op": op, "backend": backend, "device": device, "us": medians})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = run(options.device, options.backend)
    for row in rows:
        print(f"{row['op']:18s}", *(f"{name} {us:8.1f} us" for name, us in row["us"].items()), sep="  ")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
