"""The egress process with secrets, over many sandboxes and many requests: `make soak AREA=network`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.world import NAMES, PUBLIC, open_world

pytestmark = [pytest.mark.soak, pytest.mark.user_soak]
HOST = "api.anthropic.com"
VALUE = "sk-ant-api03-RealValue0123456789abcdefXYZ"
# Requests in threads, each on a connection of its own, and all on one connection; each is echoed with the placeholder.
ASKS = """
import concurrent.futures, http.client, os, ssl
key = os.environ["ANTHROPIC_API_KEY"]
def ask(count):
    connection, good = http.client.HTTPSConnection("api.anthropic.com", timeout=60), 0
    for _ in range(count):
        connection.request("GET", "/plain", headers={"x-api-key": key})
        good += f"x-api-key: {key}" in connection.getresponse().read().decode()
    connection.close()
    return good
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    print(sum(pool.map(ask, [1] * ARGUMENT + [ARGUMENT])))
"""
SANDBOXES = """
import cloche, os
from cloche.egress import client
os.environ["ANTHROPIC_API_KEY"] = ARGUMENT["value"]
came = []
for _ in range(ARGUMENT["sandboxes"]):
    code = f"ARGUMENT = {ARGUMENT['requests']}\\n" + ARGUMENT["code"]
    result = cloche.run(code, secrets=["ANTHROPIC_API_KEY"], timeout=120, memory="1g")
    pid = client._process_with_secrets.process.pid
    status = open(f"/proc/{pid}/status").read()
    fds = len(os.listdir(f"/proc/{pid}/fd")) if os.geteuid() == 0 else 0
    came.append([result.stdout.strip(), pid, int(status.partition("VmRSS:")[2].split()[0]), fds])
print(json.dumps(came))
"""
SANDBOX_COUNT, REQUESTS = 40, 150
MOST_GROWN_KB = 10 << 10


def test_many_sandboxes_leave_nothing_in_the_egress_process() -> None:
    """Each request of each sandbox is answered with its placeholder; memory and descriptors stay as they are."""
    with open_world({**NAMES, HOST: [[PUBLIC]]}) as world:
        argument = {"value": VALUE, "code": ASKS, "sandboxes": SANDBOX_COUNT, "requests": REQUESTS}
        rows: list[list[Any]] = world.run(SANDBOXES, argument)
    printed, pids, sizes_kb, descriptors = zip(*rows, strict=True)
    assert set(printed) == {str(2 * REQUESTS)}
    assert len(set(pids)) == 1
    settled = SANDBOX_COUNT // 4
    assert max(sizes_kb[settled:]) - sizes_kb[settled] < MOST_GROWN_KB, sizes_kb
    assert max(descriptors[settled:]) - descriptors[settled] <= 2, descriptors
