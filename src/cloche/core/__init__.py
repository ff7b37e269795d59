"""What Cloche means: requests, results, limits, policies, levels, as values and pure rules.

In: plain values from every layer above. Out: frozen values that are checked when they are made, or an error that says
who is to blame (`errors`). Standard library only, no I/O, no clock, no import from another folder of Cloche.

- A run: `request` (code or command, its files; also an agent's container), `limits` (amounts and their parsers),
  `policy` (rules; tables of presets, tiers, backend names, placements), `result` (also `decide`: which status a run
  has), `enforcement` (levels, controls, what was in force), `events` (events of a run, progress, bounded output).
- The network: `hosts` (addresses in all spellings and their kinds, names in one), `network` (rules and decisions);
  `ceilings` (what an operator lets anyone ask for, where it is no amount).
- The guest: `languages` (one row per language), `screen` (Python's syntax tree before a run), `frames` (codec of
  sessions and of values), `guest_json` (JSON from a guest in bounded time), `escape` (its text on a terminal).
- `protocols` (what a backend must offer and what it may), `layers` (the same for packages, with the interpreter that
  they are for), `fixing` (auto-fix as values), `loops` (waiting in asyncio), `suppressed` (errors that are only
  logged), `record` (what all these values are made with).

Must not change: public names, error texts, the precedence of statuses, bounds on guests. Rows of tables may be added.
"""
