"""The caller's side of the jail: compile the set-up, start the helper, find out which features the host allows.

In: policy and limits as plain values. Out: the set-up as data, a started helper, the kernel's features.

- `plan` has the order of all steps: mounts, identity, limits; `file_steps` the files of a run.
- `mounts` is the file tree; `privileges` has capabilities, rlimits, Landlock rules and limits per user namespace;
  `seccomp` has the table of system calls, the BPF filter and docker's profile.
- `launch` packs the modules of a helper and starts helper, fork server, shim and probe. `probe` tries whether a jail is
  possible, and each kernel feature for `cloche doctor`. `cache` keeps files between processes.

To be kept: nothing here is loaded in a helper, only in the probe process; it may import from `jail`, never the other
way. The order of steps in `plan` and the table in `seccomp` are the security boundary: change them only with the
attempts in tests/escape. The archive is kept between processes, so another layout of it needs another file name.
Descriptions of steps may change freely; their names may not (`files` reports that a file was refused).
"""
