"""The engine Kubernetes: warm pods of a Deployment, of which a lease or a coordinator claims one at a time.

Input: a cluster (a kubeconfig's context, or the pod that this runs in). Output: leases. Each coordinator runs in its
caller's process. The label of a pod is the lock: a claim is a patch that is guarded by the pod's resource version.

- `api.py`: requests to the API server, and its errors as sentences; `watching.py`: the pods, kept up to date.
- `pods.py`: what a pod says about itself, and how it is claimed; pure. `engine.py`: pods as nodes and blocks.
- `holders.py`: the object that says which coordinator lives, and the removal of what dead ones left.
- `fleet.py`: the caller's side and the operator's. `manifests.py`: what a cluster needs; pure. `applying.py`: apply it.
"""
