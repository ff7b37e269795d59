"""The audit log: who ran which code, when, with which limits, and how it ended.

Input: requests and results from `execution`, decisions from `agent`. Output: lines of a file, each with the hash of the
previous one; stored code and output; OpenTelemetry spans.

- `log`: `Audit.record` and `note`, and the log that the settings ask for. `recording`: the two events around each run.
- `redaction`: removes secrets from text before it is written. `chain`: one line and its hash; pure.
- `writer`: append, lock, rotate. `artifacts`: stored code and output. `prune`: removes artifacts by age and by size.
- `verify`: reads the log and finds tampering; the state of the log for `cloche doctor`.
- `query`: filters for events, and pages of the newest ones. `export`: events as JSON Lines, JSON, CSV.
- `telemetry`: spans and metrics, if OpenTelemetry is imported.

Invariants: the format of a line and of the chain, because logs outlive versions; and nothing runs if auditing is on and
the log cannot be written. Everything else may change freely.
"""
