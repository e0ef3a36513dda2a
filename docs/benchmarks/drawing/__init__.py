"""Parts of docs/benchmarks/draw.py."""
