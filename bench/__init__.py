"""Benchmarks: ratios measured turn by turn in one run, never absolute times alone."""
