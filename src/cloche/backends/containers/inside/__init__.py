"""The code that runs inside a container: its first process, which serves the caller's orders (`reaper`).

These files are sent into the container as text and imported there as the package `inside`, beside `interpreter`. In:
frames from the caller on standard input. Out: frames on standard output. `link` reads and writes frames and reads the
counters of control groups; `program` starts one program, watches its memory, kills its leftover processes, and holds
the preforked guest; `files` reads and writes the workspace by descriptor.

`live` is the host of the loop of `init`, which is sent along: it replaces `reaper` in a live sandbox, and takes
over in a container that gets a session. `network` is a separate program for a helper container, which arranges the
network of another container.

Must not change: imports are from the standard library or relative; Python 3.11 suffices, and no other package of the
image is used. `containers/container.py` lists the files, so a new one is added there. A guest can send everything that
this code can send, so the caller trusts none of it.
"""
