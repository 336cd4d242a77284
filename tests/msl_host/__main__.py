"""``python -m msl_host`` in the folder above: CPU seconds that a build and a launch take on this machine."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

import mlx.core as mx

from . import Host, Kernel

SUM = """
uint row = threadgroup_position_in_grid.x, lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
threadgroup float sums[8];
float sum = 0;
for (uint k = simdgroup; k < a_shape[1]; k += 8) sum += simd_sum(a[(row * a_shape[1] + k) * 32 + lane] * SALT);
if (lane == 0) sums[simdgroup] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index_in_threadgroup == 0) {
  float all = 0;
  for (uint s = 0; s < 8; s++) all += sums[s];
  out[row] = all;
}
"""


def cpu_seconds(function: Callable[..., object], *arguments: object) -> float:
    """User and system time of this process and of compilers it waits for."""

    def now() -> float:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in usage)

    began = now()
    function(*arguments)
    return now() - began


def measure(host: Host) -> str:
    large = mx.random.normal((8, 4096, 32))
    small = large[:1, :8]
    mx.eval(large, small)
    salt = time.time_ns()  # texts that no cache has seen
    kernels = [
        host.metal_kernel("row_sums", ["a"], ["out"], SUM.replace("SALT", f"{salt}.{number}f")) for number in range(6)
    ]

    def run(kernel: Kernel, array: mx.array) -> None:
        kernel(
            inputs=[array],
            grid=(256 * len(array), 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(len(array),)],
            output_dtypes=[mx.float32],
        )

    first, *others = [cpu_seconds(run, kernel, small) for kernel in kernels]
    launch = statistics.median(cpu_seconds(run, kernels[0], small) for _ in range(50))
    long = statistics.median(cpu_seconds(run, kernels[0], large) for _ in range(5))
    switches = host.report.switches if host.report else 0
    return (
        f"first kernel {first:.2f} s, another {statistics.median(others):.2f} s, "
        f"a launch of 256 threads {1000 * launch:.1f} ms, {switches:,} switches between threads {long:.2f} s"
    )


if __name__ == "__main__":
    for check in (False, True):
        print(f"check={check}: {measure(Host(check=check))}")
