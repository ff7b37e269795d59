"""What the servers `mcp` and `server` have in common.

In: an ASGI application, or a coroutine that serves. Out: an exit code. `process.py` needs the standard library alone:
logs and signals; so does `json_bounds.py`: how much JSON may come. `http.py` needs uvicorn: bounds on connections,
listening, addresses.
"""
