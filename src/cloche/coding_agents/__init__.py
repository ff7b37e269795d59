"""Coding agents that run in a sandbox, on a folder of the user's: `cloche agent`.

In: the name of an agent, a project's folder, the user's options. Out: a sandbox with a name, in which the agent runs on
a view of the folder; its state, kept on the host; archives of its work.

- The agent: `row` describes one, `table` has the known ones, `own_rows` those of the user; `find` finds its program,
  `install` and `installed` put it into Cloche's data.
- The start: `places` names sandbox and folders; `plan` has the keywords (pure); `launch` opens or finds the sandbox,
  `about` notes its settings; `home_files`, `limits_text` and `conversations` are what the agent finds in its home.
- Its work: `watch` saves it in `archives`, with `steps`; `review`, `discard`, `forks` and `compare` are for the user;
  `kept_state` shows what the next session would obey; `running`, `terminal_note`, `network_summary`, `dev_servers`
  and `folder_size` tell what it does.
- Its login: `logins`, `login_key`, `login_links`, `login_sandbox`. Its boundaries: `doctor`, `boundaries`, `inside/`.
- Agents on the host: `host_hooks`, `host_config`, `host_shell`, `mcp_clients`; `json_text` and `toml_text` edit files.

To be kept: a project's file can add no row and change none. What an agent leaves in its state is the guest's: it is
never run, followed or parsed without a bound on the host.
"""
