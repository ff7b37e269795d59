"""The engine Ray: nodes of a Ray cluster run sandboxes for those who use the cluster.

Input: a cluster (`RAY_ADDRESS`, or a local one that is started). Output: leases. `cluster` joins it and awaits its
answers; `engine` has nodes and blocks, for the coordinator; `coordinator` is the detached actor around that;
`supervisor` is the actor of a node, sent as text; `fleet` is the caller's side. `service` serves callers outside of the
cluster, and `jobs` is how they have it started, by HTTP.
"""
