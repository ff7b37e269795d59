"""What the init of a sandbox that lives runs: many processes at once, for a client outside. The standard library alone.

In: frames of a client (`wire`), and from its host (`loop.Host`) how a process becomes a guest, and who else belongs to
it. Out: frames with output, exits, files, and bytes of connections.
`wire` is the one protocol between a sandbox and whoever is outside of it, with all its operations. `loop` waits for
descriptors and clocks, `server` does what the client asks. `process` is one process with its streams, its end, and what
is kept for a client that comes back; `tree` ends all that belongs to a process; `terminal` makes pseudo-terminals;
`files` is what runs, with a guest's own rights, to read or change files, made of `content`, `folders`, `archive` and
`watch`, with names of any bytes (`names`) and `patterns`; `ports` connects to servers inside and lists them.

To be kept: relative imports alone; Python 3.11, since containers get these files as text; nothing waits but the loop;
whatever a process or a client sends is bounded in number and bytes before it is kept. All else may be changed without
asking, but for the operations in `wire`, which clients of another version may speak.
"""
