"""The benchmark: what a run of Cloche costs, cold and warm, beside a plain subprocess.

In: a setting (rounds, runs). Out: a report of plain values, and a picture of it.
`harness` measures: interleaved turns, percentiles, memory, leaks; `burst` from several threads. `scenarios` says what
is measured. `report` runs all events and draws the picture. Sessions, sandboxes that live, output, whole commands and
other projects' sandboxes are measured by the project's own `bench/`, which is not installed.

To be kept: ratios come from turns in one process, never from absolute times of two runs; names of rows, which
docs/benchmarks.md and bench/targets.py use. All else may be changed
without asking.
"""
