"""The audit log: who ran what, when, with which limits, and how it ended.

In: requests and results from `execution`, decisions from `agent`, files that were opened (`log`).
Out: lines in a file in which each carries the hash of the one before (`chain`, `writer`), kept artifacts, spans of
OpenTelemetry (`telemetry`); what was changed in it later (`verify`); less of it, on request or by age (`prune`).
Secrets are taken out before anything is written (`redaction`).

To be kept: the format of a line and of the chain, since logs outlive versions; that a failed write ends the run
where the log is required. All else may be changed without asking.
"""
