"""Triton kernels: CUDA and ROCm, or a CPU under ``TRITON_INTERPRET=1``."""
