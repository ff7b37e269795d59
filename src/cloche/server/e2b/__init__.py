"""E2B's protocol over the sandboxes of the service (`cloche serve --e2b`): an ASGI application of its own listener.

Input: requests of E2B's SDKs. A request to a port of a sandbox names it by headers or by its host name (`target.py`);
all others go to the control plane. Output: what E2B answers, its errors included. Three ports are served here, not
inside: envd's (`envd/`), the code interpreter's (`code/`), and the control plane's own. Each module has a table `ROWS`
of its routes (`calls.py`). How a sandbox works is nowhere here: routes translate to `Sandboxes` and `AsyncSandbox`.
"""
