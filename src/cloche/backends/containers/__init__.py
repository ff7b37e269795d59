"""What the backends docker, gvisor, microvm and microsandbox share: all run programs in containers of some kind.

In: a container that a backend started, with our first process in it (`inside`). Out: results, sessions, files.
`container` frames its streams and sends the first process its code; `program` says what is run there, with which
environment and rlimits; `run` receives one run's frames, kills it and makes its result; `session` and `sandbox` do so
for sessions and for the whole sandbox, whose workspace passes from container to container; `pool` keeps containers
started in advance; `archive` reads the files that come out. `live` is one container for a sandbox that lives;
`machines` is what backends share whose containers are in a machine.

To be kept: whatever comes out of a container may be the guest's, so it is bounded and checked where it is read
(`container.read_object`, `run.read_report`, `archive`). No container runs two programs, but one of `live`. Tags of
frames stand twice, in `container` and in `inside/link.py`, and are changed together. Sizes of the pool and timeouts may
be changed freely.
"""
