"""Coding agents that run in a sandbox, on a folder of the user's: `cloche agent`.

In: the name of an agent, a project's folder, the user's options. Out: a sandbox with a name, in which the agent runs on
a view of the folder; its state, kept on the host; archives of its work.

`row` describes an agent; `table` has the known ones; `places` names its sandbox and its folders; `plan` turns a row and
options into the keywords of a sandbox (pure); `launch` opens or finds the sandbox.

For an agent that runs on the host: `host_hooks` has its commands run in a sandbox, `host_shell` runs them there and
keeps one folder, `mcp_clients` adds `cloche mcp` to clients; `host_config` edits their files, by `json_text` and
`toml_text`.

To be kept: a project's file can add no row and change none. What an agent leaves in its state is the guest's: it is
never run, followed or parsed without a bound on the host.
"""
