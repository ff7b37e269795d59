"""What the servers `mcp` and `server` have in common.

In: an ASGI application, or a coroutine that serves. Out: an exit code. `process.py` needs the standard library alone:
logs and signals. `http.py` needs uvicorn: bounds on connections, listening, addresses.
"""
