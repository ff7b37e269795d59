"""What tests are written with. Nothing in here is a test, and no claim is made here.

By what tests need: `containers` (docker, a registry), `machines` and `stand_in` (virtual machines, Firecracker's
stand-in), `microsandboxes`, `processes` (find, end, hold up, interrupt, start warm), `environments` and users,
`sessions` (a driver without a jail), `world` and `internet` (servers at any address, in namespaces), `terminals`,
`batches`, `models` and `mcp` (servers on loopback, clients), `texts` (programs, skills, examples of documents), `e2b`
(the service for E2B's own SDKs), `audits`, `faults`, `bench`, `loops` (of asyncio), `packages` (wheels, sources, an
index), `npm` (tarballs, a registry), `json_shapes`, `virtual_loop` (an event loop that does not wait), `ray_cluster`
(nodes of Ray in namespaces, whose cables can be cut), `kubernetes_cluster` (the same with Kubernetes),
`namespace_calls` (functions that run there), `kubernetes_api` (an API server of the tests' own, whose pods are servers
of this machine), `kubernetes_kubelet` (which runs their containers as they are written), `kubernetes_sandboxes` (a
controller for the objects of agent-sandbox), `kubectl` (its commands in the documents). `leaks` and `outcome` say what
a test run left behind, and `worker` runs what scripts/gate.py hands out. `programs` are started as processes of their
own. `escape` is what attempts to get out are run with.
"""
