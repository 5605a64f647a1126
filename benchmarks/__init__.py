"""Benchmarks: each row is one problem, jaxconv against XLA in the same run. `python -m benchmarks --help`."""
