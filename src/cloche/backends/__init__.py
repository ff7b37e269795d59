"""Backends: each runs programs behind a different boundary, one folder each; no folder imports another.

In: policy, limits and a request (`core`). Out: open sandboxes, results, sessions, files (`core.protocols`). `local`
uses this host's kernel alone; `docker`, `gvisor`, `microvm` and `microsandbox` run containers or virtual machines and
share `containers`. The files here are shared by several of them:

- `enforcement`: the controls of all backends, and the refusal of a policy that asks for more;
- `host`: the abilities of this host, cached for later processes; `toolchain`: the programs of a language on it;
  `layout`: the parts of its system that every jail shows; `subordinate_ids`: ids for an ordinary user's guests;
- `live`: a live sandbox, over the link to its init (`init_link`, with the channels of `cloche.channels`);
  `live_runs`, `live_session`, `live_files` and `live_streams` are its runs, sessions, files and the streams of its
  processes;
- `session`: cells of a live session over any transport; `cell_outputs`: the outputs of a cell; `session_languages`: its
  drivers; `results`: a `Result`;
- `saved_files`: a run's files, copied to the caller; `archive`: files that arrive as an archive;
- `garbage_collection`: removal of resources that killed processes left.

Must not change: a missing control that is required is an error, never a weaker run; no link made by
a guest is followed, and no claim of a guest is trusted; names that other processes read (control groups, labels, cache
files). Everything else may be changed without asking.
"""
