"""Engines: what decides on which node a sandbox runs. The seam is `core.fleet`; all else goes by the wire.

Input: specifications of leases. Output: leases, signed for one node each. `signing` makes and checks credentials,
`decisions` is the coordinator's rules without I/O, and each engine has a module or a folder.
"""
