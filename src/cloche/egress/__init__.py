"""The network of a jail, served from outside: what a guest may reach is decided by name, and its bytes are read here.

In: sockets that were born in a jail, the rules of its policy, and bytes from a guest, which are hostile. Out: answers
of a name server, connections that are passed on, refusals with a sentence.

- The caller's side: `client` starts the egress process, opens a sandbox's network in it, and asks what that has
  carried; `windows` counts for several runs at once that share one.
- The egress process: `process` is its start and end. `network` is one sandbox's: sockets, connections, decisions, with
  `names` (addresses for names) and `ledger` (rows of what was carried and refused). `upstream` resolves, checks the
  addresses (`own_addresses`: not the host's own) and connects.
- Readers without I/O: `dns` (one question, one answer), `client_hello` (the server name of a TLS connection),
  `http_request` (what a head may look like, and how it is written anew; where an answer ends). What they raise is
  declared, `errors.Refused` above all, and time and memory are bounded whatever the bytes.
- `stream`: a connection's two directions, passing them on with backpressure and half-close, and turns. `http`: the
  relay of plain HTTP, which decides for each request.

To be kept: no question is passed on, and nothing of a request as it came: what goes upstream is written anew. What a
guest can cause has a bound. Where the egress process is gone, nothing is reached.
"""
