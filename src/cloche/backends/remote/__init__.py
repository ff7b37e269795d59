"""What backends share whose sandboxes are on other machines.

| module | what it holds |
|---|---|
| `accounts` | whether an account can be used at all, before anybody is asked |
| `claims` | what a provider says of its sandboxes, and the refusal where that does not do |
| `failures` | one sentence for each way in which a provider does not give what is asked for |
| `quota` | counters of runs, seconds, sandboxes and money, shared by all processes of a user |
"""
