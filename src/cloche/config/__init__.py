"""What was configured, by whom, and what wins.

In: files, environment, `.env`, arguments (`sources`). Out: one `Settings` that nobody changes (`settings`).
`keys` has one row for each configuration key, `readers` what parses values, `resolve` what wins.

To be kept: a file that came with a checkout can only tighten what its user allows; each value knows where it came
from. A key is added by its row (docs/contributing.md).
"""
