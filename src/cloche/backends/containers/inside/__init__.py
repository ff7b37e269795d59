"""What runs inside a container: its first process, which serves the caller's orders (`reaper`).

These files are sent into the container as text, and imported there as the package `inside`, beside `interpreter`.
In: frames from the caller on standard input. Out: frames on standard output. `link` speaks them, and reads counters of
control groups; `program` starts one program, watches its memory and kills what it left, and holds the guest that was
forked in advance; `session` serves a program with a link; `files` reads and writes the workspace by descriptor.

`live` is the first process of a sandbox that lives in place of `reaper`: the host of the loop of `init`, which is sent
along. `network` is a program of its own, for a container beside another one, whose network it arranges.

To be kept: the standard library alone, relative imports alone, and Python 3.11, whatever the image has besides. A
new file must be named in `containers/container.py`. A program can send anything that this code can: the caller
believes none of it.
"""
