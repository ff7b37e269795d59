"""The project's own benchmarks: ratios measured in turns in one run, never absolute times alone.

`python -m bench` holds `contest` in fresh `environments` and compares the report with `targets`. `commands`,
`sessions`, `live` and `output` say what is measured beside the runs of `cloche.bench`, whose harness measures all of
it. `peers` starts other projects' sandboxes, `peer_process` is the program that holds one of them in its own virtual
environment (`srt_driver.mjs` the same for Node). `audit` measures the cost of the audit log, `frames` that of reading
a hostile guest's messages, `host_functions` calls of the caller's functions. Figures are in `results/`.
"""
