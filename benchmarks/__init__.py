"""Benchmarks that leave records: `python -m benchmarks <case>` appends to benchmarks/results/<device>/."""
