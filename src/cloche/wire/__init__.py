"""The wire of Cloche's own client: many calls over one connection, each checked like a request.

Input: whole messages of a client (`sockets.MessageSocket`), and a host (`host.WireHost`) that knows callers, their
permissions and their sandboxes: the service with its records, or a node with its leases. Output: frames, as
`docs/service/wire.md` specifies them. Nothing here imports a web framework or a database.

- `connection.py`: frames and calls; `calls.py`: one call with its streams; `verbs.py`: the table of verbs.
- `work.py`: the work of verbs that stream; `inputs.py`: files of runs; `copies.py`,
  `sandbox_changes.py`: changes of files; `questions.py`, `asking.py`: hosts that a client is asked about.
- `host_calls.py`, `session_calls.py`: calls of the client's functions by programs here.
- `sandboxes.py`, `files.py`, `processes.py`, `sessions.py`: work in a sandbox, also of the service's routes.
- `attachments.py`: a sandbox that this process uses; `held.py`: one that it holds itself; `uses.py`: its use by a call.
- `exec_options.py`: the options that a caller may set; `allowed.py`: within what the operator configured.
- `orders.py`, `queue.py`, `places.py`: runs and their turns; `events.py`, `results.py`: what is told of them.
- `load.py`, `shares.py`: bounds; `bodies.py`: bounded JSON; `problems.py`: errors; `callers.py`: who calls.

Needs pydantic, which the extras `server` and `node` install.
"""
