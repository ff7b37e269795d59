"""Backends: what runs a program behind a wall, one folder each, of which none knows another.

In: policy, limits and a request (`core`). Out: open sandboxes, results, sessions, files (`core.protocols`). `local`
uses this host's kernel alone; `docker`, `gvisor`, `microvm` and `microsandbox` run containers or virtual machines and
share `containers`. The files here are shared by several of them:
- `enforcement`: the controls of all backends, and the refusal of a policy that asks for more;
- `host`: what this host gives, and answers kept for later processes; `toolchain`: the programs of a language on it;
  `layout`: the parts of its system that every jail shows; `subordinate_ids`: ids for an ordinary user's guests;
- `live`: a sandbox that lives, by the link to its init (`init_link`, whose channels are those of `cloche.channels`);
  `live_runs`, `live_session`, `live_files` and `live_streams` are its runs, sessions, files and what comes of a
  process;
- `session`: cells of a live session over any transport; `cell_outputs`: what each shows; `session_languages`: its
  drivers; `results`: a `Result`;
- `saved_files`: a run's files, copied to the caller; `archive`: those that come as an archive;
- `garbage_collection`: what killed processes left is removed.

To be kept: what is missing and required is an error, never a weaker run; nothing that a guest made is followed or
believed; names that other processes know (control groups, labels, cache files). All else may be changed without asking.
"""
