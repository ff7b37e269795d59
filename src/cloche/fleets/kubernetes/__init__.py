"""The engine Kubernetes: pods, one for each lease or for several. Modes differ in where the pods come from.

Input: a cluster (a kubeconfig's context, or the pod that this runs in). Output: leases. Each coordinator runs in its
caller's process.

- `api.py`: requests to the API server, and its errors as sentences; `watching.py`: the pods, kept up to date.
- `pods.py`: descriptions of pods, the patch that claims one, and pods that are made claimed; pure.
- `engine.py`: pods as nodes and blocks; `servers.py`: the servers in them, by their logs.
- `sources.py`: the interface of a mode; `warm.py`: the pods of a Deployment, whose label is the lock, since a claim is
  a patch that is guarded by the pod's resource version; `made.py`: a pod for each lease, with a caller's image;
  `pooled.py`: claims on a pool of agent-sandbox. `offers.py`: nodes that the last two make.
- `holders.py`: the object that shows that a coordinator lives, and the removal of pods of dead ones.
- `fleet.py`: the caller's side and the operator's; `examine.py`: a look for `cloche doctor`.
- `manifests.py`: the objects that a cluster needs; pure. `applying.py`: apply them.
"""
