"""Shared code of the servers `mcp`, `server` and `node`.

Input: an ASGI application, or a coroutine that serves. Output: an exit code. `process.py` (logs and signals) and
`json_bounds.py` (bounds on JSON) need only the standard library. `certificate.py`, which makes certificates, needs
cryptography. `http.py` needs uvicorn: bounds on connections, listening sockets, addresses.
"""
