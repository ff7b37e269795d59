"""A small internet in namespaces of its own, for tests that need servers with addresses: `python -m` runs it.

Theory of operation. `world.py` starts one process. It makes two network namespaces, joined by a pair of interfaces:
the *host*, where the code under test runs, and the *internet*, where every address that is not the host's is local, so
that a server answers on each, also those that must never be reached. No interface leads further. In both a process
serves and keeps a record of what arrived, which a test reads over a socket. Files are on a tmpfs of a private mount
namespace, so all of it is gone with the processes.

`record` is what arrived, `packets` what passed the pair of interfaces, `listeners` takes connections and datagrams,
`streams` reads them with and without TLS, `names` is the name server, `web` speaks HTTP, and `sites` are what is served
by it: an index of packages, a registry, repositories; `providers` want credentials. `build` makes certificates, routes
and mounts.
"""
