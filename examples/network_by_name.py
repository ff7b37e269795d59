"""Reach hosts by name, and nothing else: what a program may connect to, and what it reads where it may not.

Run it: python examples/network_by_name.py
Nothing here connects to anybody: the one host that is allowed is only looked up, inside of the sandbox.
"""

import cloche

PROGRAM = """
import socket, urllib.error, urllib.request

print("index.example.org is", socket.gethostbyname("index.example.org"))  # an address that is this sandbox's own
try:
    urllib.request.urlopen("http://198.51.100.7/")
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode().strip())
urllib.request.urlopen("https://api.example.com/")
"""

with cloche.Sandbox(network="allowlist", network_allow=["index.example.org", "*.files.example.org"]) as sandbox:
    result = sandbox.run(PROGRAM)
    print(result.stdout, end="")
    print(result.status)  # denied: it ended with an error, and something was refused
    for row in result.network_refused:
        print(f"refused: {row['why']}")

    sandbox.network.allow("api.example.com")  # from now on, in this sandbox alone
    print("now", sandbox.run("import socket; print(socket.gethostbyname('api.example.com'))").stdout, end="")
