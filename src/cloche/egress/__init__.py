"""The network of a jail, served from outside: what a guest may reach is decided by name, and its bytes are read here.

In: sockets that were born in a jail, the rules of its policy, and bytes from a guest, which are hostile. Out: answers
of a name server, connections that are passed on, refusals with a sentence.

- Readers without I/O: `dns` (one question, one answer), `client_hello` (the server name of a TLS connection),
  `http_request` (what a head may look like, and how it is written anew; where an answer ends). What they raise is
  declared, `errors.Refused` above all, and time and memory are bounded whatever the bytes.
- `stream`: a connection's two directions, and passing them on with backpressure and half-close. `http`: the relay of
  plain HTTP, which decides for each request.

To be kept: no question is passed on, and nothing of a request as it came: what goes upstream is written anew.
"""
