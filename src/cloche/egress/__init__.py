"""The network of a jail, served from outside: rules decide by name, and a guest's bytes are read here.

In: sockets created in a jail, the rules of its policy, and bytes from a guest, which are hostile. Out: answers of a
name server, carried connections, refusals with a sentence.

- The caller's side: `client` starts the egress process, opens a sandbox's network in it, and asks for its traffic;
  `windows` counts the traffic of several runs that share one network.
- The egress process: `process` is its start and end. `network` is one sandbox's: sockets, connections, decisions, with
  `names` (addresses for names) and `ledger` (rows of carried and refused connections). `upstream` resolves, checks the
  addresses (`own_addresses`: not the host's own) and connects.
- Readers without I/O: `dns` (one question, one answer), `client_hello` (the server name of a TLS connection),
  `http_request` (the valid forms of a request's head, its new text, the end of a response). They raise declared errors,
  `errors.Refused` above all, and bound time and memory for all input.
- Secrets: `opened` holds those of one sandbox, and opens connections to their hosts. `tls` is its authority and bytes
  inside TLS, `credentials` puts values into requests, and `redaction` takes them out of answers. `aws` signs requests
  anew.
- HTTP/2: `http2` is the relay, `http2_side` one of its two connections, `http2_frames` what is taken from it, and
  `http2_request` the valid forms of a head.
- Web sockets: `web_sockets` searches their messages.
- `stream`: a connection's two directions, carried with backpressure and half-close, and turns. `http`: the relay of
  plain HTTP, which decides for each request.

To be kept: no DNS question is passed on, and no byte of a request as it came: requests are written anew. All that a
guest can cause is bounded. Without the egress process no host is reachable.
"""
