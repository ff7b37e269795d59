"""Code shared by the backends whose sandboxes run on other machines.

| module | content |
|---|---|
| `accounts` | checks an account's configuration without contacting the provider |
| `claims` | controls that a provider claims for its sandboxes, and the check of a policy against them |
| `failures` | one sentence and one remedy for each way a provider can fail |
| `quota` | counters of runs, seconds, sandboxes and money, shared by all processes of a user |
"""
