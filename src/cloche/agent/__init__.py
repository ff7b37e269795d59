"""Tools for a model, and the approval of risky calls.

In: the name of a tool and arguments from a model, which are hostile; the operator's sandbox options. Out: an `Answer`
of bounded text and figures.

`catalog` is the table of tools: names, arguments, risks, tiers. `toolbox` checks a call, asks for approval, runs it.
`interpreters` keeps interpreters between calls and evicts them; `host` runs a command on the host (tier 4) and reads
and writes /memory and /configs; `answers` writes the text for the model. `approval` decides (risk, gate, automatic
approvers), `terminal` asks a person, `queue` stores requests in SQLite. `exports` translates the tool list for OpenAI,
Anthropic and plain functions; `functions` is `run_python_code`; `code_mode` is one tool that runs programs which call
others; `container` writes the `docker run` of an agent's own container.

Must not change: without a yes in time the answer is no; an approval holds for exactly the call and the rules that were
displayed; a model can only ask for less than the operator set. Descriptions and hints may be changed freely.
"""
