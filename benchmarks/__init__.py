"""Measurements: `python -m benchmarks.run SUITE`; the method is in `timing.py`."""
