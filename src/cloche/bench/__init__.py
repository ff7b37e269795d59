"""The benchmark: the cost of a run of Cloche, cold and warm, beside a plain subprocess.

In: a setting (rounds, runs). Out: a report of plain values, and a picture of it.
`harness` measures: interleaved turns, percentiles, memory, leaks; `burst` from several threads. `scenarios` defines the
measured cases. `report` runs all events and draws the picture. Sessions, live sandboxes, output, whole commands
and other projects' sandboxes are measured by the project's own `bench/`, which is not installed.

Must not change: ratios come from turns in one process, never from absolute times of two runs; names of rows, which
docs/benchmarks.md and bench/targets.py use. Everything else may be changed without asking.
"""
