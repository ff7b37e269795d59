"""The audit log: who ran what, when, with which limits, and how it ended.

In: requests and results from `execution`, decisions from `agent`. Out: lines in a file in which each carries the hash
of the one before, kept code and output, spans of OpenTelemetry.

- `log`: `Audit.record` and `note`, which log the settings ask for. `recording`: the two events around each run.
- `redaction`: secrets are taken out of text before it is written. `chain`: one line and its hash; pure.
- `writer`: append, lock, rotate. `artifacts`: kept code and output. `prune`: removes them by age and by size.
- `verify`: reads the log and finds what was changed; the state of the log for `cloche doctor`.
- `query`: which events are wanted, a page of the newest. `export`: events as JSON Lines, JSON, CSV.
- `telemetry`: spans and measurements, where OpenTelemetry is imported.

To be kept: the format of a line and of the chain, because logs outlive versions; that nothing runs where the audit is
on and cannot be written. All else may be changed without asking.
"""
