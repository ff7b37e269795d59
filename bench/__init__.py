"""The project's own benchmarks: ratios measured in turns in one run, never absolute times alone.

`python -m bench` runs `cloche.bench` in fresh environments (`environments`, `contest`) and compares the report with
`targets`; `audit` measures the cost of the audit log, `frames` that of reading a hostile guest's messages. Figures are
in `results/`.
"""
