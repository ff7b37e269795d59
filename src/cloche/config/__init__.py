"""What was configured, by whom, and what wins.

In: files, environment, `.env`, arguments. Out: one frozen `Settings` in which each value knows where it came from.

- `keys`: one row per configuration key; `Settings`. All else follows from these and `options`.
- `options`: `SandboxOptions`, the keywords that say how a sandbox is made.
- `origins`: where a value came from; a layer, which is what one source says.
- `readers`: how a value is parsed and checked. `plain_yaml`: YAML as bounded plain data.
- `sources`: which files exist, and what files, environment, `.env` and arguments say, as layers.
- `resolve`: which layer wins; presets, tiers, ceilings; files that may only tighten.
- `state`: the file of the user's records.
- `settings`: `load_settings`, with a cache, and whether these settings let code run.

Must not change: a file that came with a checkout can only tighten what its user allows; each value has its origin.
A key may be added freely: it is one row (docs/contributing.md).
"""
