"""Compiled and vectorised kernels, installed as ``dkv.kernels``."""
