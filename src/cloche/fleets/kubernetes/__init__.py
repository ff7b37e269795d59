"""The engine Kubernetes: warm pods of a Deployment. A coordinator claims one at a time.

Input: a cluster (a kubeconfig's context, or the pod that this runs in). Output: leases. Each coordinator runs in its
caller's process. The label of a pod is the lock: a claim is a patch that is guarded by the pod's resource version.

- `api.py`: requests to the API server, and its errors as sentences; `watching.py`: the pods, kept up to date.
- `pods.py`: the description of a pod, and the patch that claims it; pure. `engine.py`: pods as nodes and blocks.
- `holders.py`: the object that shows that a coordinator lives, and the removal of pods of dead ones.
- `fleet.py`: the caller's side and the operator's; `examine.py`: a look for `cloche doctor`.
- `manifests.py`: the objects that a cluster needs; pure. `applying.py`: apply them.
"""
