"""The init of a live sandbox: it runs many processes at once, for a client outside. Standard library alone.

In: frames of a client (`wire`), and from its host (`loop.Host`) how a process becomes a guest, and the other processes
of its tree. Out: frames with output, exits, files, and bytes of connections.

- `wire` is the one protocol between a sandbox and its clients, with all operations.
- `loop` waits for descriptors and clocks, `server` performs the client's operations.
- `process` is one process, its end, and with `streams` the output kept for a client that returns; `control` reaches one
  whose output another client reads; `tree` ends all processes of a tree; `terminal` makes pseudo-terminals.
- `files` runs with a guest's own rights to read or change files. It uses `content`, `folders`, `archive` and `watch`,
  with names of any bytes (`names`) and `patterns`.
- `ports` connects to servers inside and lists them.

To be kept: relative imports alone; Python 3.11, since containers get these files as text; only the loop waits; all
input of processes and clients is bounded in number and bytes before it is kept. All else may change freely, but for the
operations in `wire`, which clients of another version may speak.
"""
