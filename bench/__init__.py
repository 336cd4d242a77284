"""Benches of the checkout, run as ``python -m bench.NAME``; none of them is installed."""
