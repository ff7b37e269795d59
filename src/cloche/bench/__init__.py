"""The benchmark: what a run of Cloche and of other sandboxes costs, beside a plain subprocess.

In: a setting (rounds, runs, peers). Out: a report of plain values, and a picture of it.
`harness` measures: interleaved turns, percentiles, memory, leaks. `scenarios` says what is measured of Cloche: runs,
sessions, forks, imports. `peers` starts other projects' sandboxes, `peer_process` is the program that holds one of them
in its own virtual environment (`srt_driver.mjs` the same for Node). `report` runs all events and draws the picture.

To be kept: ratios come from turns in one process, never from absolute times of two runs; names of rows, which
docs/benchmarks.md and bench/targets.py use; a peer that fails is left out and says why. All else may be changed
without asking.
"""
