"""Engines: what decides on which node a sandbox runs. The seam is `core.fleet`; all else goes by the wire.

Input: specifications of leases. Output: leases, signed for one node each. `signing` makes and checks credentials.
`engine` has the protocols of an engine and of a link to a node. `decisions` is the coordinator's rules without I/O,
with `waiting` (the queue) and `placing` (nodes and their room). `coordinator` carries them out, with `tending` (one
node), `events` (for readers), `hosts` (addresses) and `lease_ids`. `leases` holds the leases of a process. Each engine
has a module or a folder: `local` is this machine.
"""
