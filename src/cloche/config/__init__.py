"""Configuration: its sources, and which of them wins.

Input: files, environment, `.env`, arguments. Output: one frozen `Settings`, in which each value has its origin.

- `keys`: one row per configuration key; `Settings`. Everything else is derived from these and `options`.
- `options`: `SandboxOptions`, the keywords of calls that open a sandbox.
- `origins`: the origin of a value; a layer, which is the content of one source.
- `readers`: parse and check values. `plain_yaml`: YAML as bounded plain data.
- `sources`: find the files, and read files, environment, `.env` and arguments into layers.
- `resolve`: precedence of layers; presets, tiers, ceilings; files that may only tighten.
- `state`: the file of the user's records.
- `settings`: `load_settings`, with a cache, and whether these settings allow code to run.

Invariants: a file that came with a checkout can only tighten what its user allows; each value has its origin. A key may
be added freely: it is one row (docs/contributing.md).
"""
