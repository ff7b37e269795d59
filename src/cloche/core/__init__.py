"""Values and pure rules: requests, results, limits, policies, levels.

In: plain values from every layer above. Out: frozen values that are checked when they are made, or an error that names
its cause (`errors`). Standard library only, no I/O, no clock, no import from another folder of Cloche.

- A run: `request` (code or command, its files; also an agent's container), `limits` (amounts and their parsers),
  `policy` (rules; tables of presets, tiers, backend names, placements), `result` (also `decide`: the status of a run),
  `enforcement` (levels, controls, the report of a run), `events` (events of a run, progress, bounded output).
- The network: `hosts` (addresses in all spellings and their kinds, names in one), `network` (rules and decisions);
  `ceilings` (an operator's ceilings on network and packages).
- The guest: `languages` (one row per language), `screen` (Python's syntax tree before a run), `frames` (codec of
  sessions and of values), `guest_json` (JSON from a guest in bounded time), `escape` (its text on a terminal).
- Grading: `grading` (cases and verdicts), `asserts` (taken apart), `literal` (values from a graded program),
  `comparison` (of outputs and values).
- `protocols` (what a backend must offer and what it may), `layers` (the same for packages, with the interpreter that
  they are for), `fixing` (auto-fix as values), `loops` (waiting in asyncio), `suppressed` (errors that are only
  logged), `record` (the base of these values).

Must not change: public names, error texts, the precedence of statuses, bounds on guests. Rows of tables may be added.
"""
