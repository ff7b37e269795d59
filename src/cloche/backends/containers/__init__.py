"""Code shared by the backends docker, gvisor, microvm, microsandbox and e2b: all run programs in containers of some
kind.

In: a container that a backend started, with our first process in it (`inside`). Out: results, sessions, files.
`container` handles its frames and sends the first process its code; `program` decides the command, environment and
rlimits of a run; `run` receives one run's frames, kills it and makes its result; `sandbox` does that for a sandbox,
whose workspace passes from container to container; `pool` keeps warm containers; `archive` (one folder up) reads the
files that come out; `live` is the one container of a live sandbox, and `session` a run's container that holds a
session instead, both over the wire of `init`; `machines` is shared by backends whose containers run in a machine.

Must not change: all output of a container may be the guest's, so it is bounded and checked where it is read
(`container.read_object`, `run.read_report`, `archive`, `init_link`); a container runs at most one program or session,
except in `live`. Frame tags are defined twice, in `container` and in `inside/link.py`, and must be changed together.
Sizes of the pool and timeouts may change freely.
"""
