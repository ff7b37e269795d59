"""`cloche-why` inside of a sandbox: a sentence for each refusal and each path that is not there, and nothing hidden."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import cloche
from cloche.coding_agents.limits_text import limit_lines
from cloche.execution.why import give_why

pytestmark = pytest.mark.both_users
RULES = ["good.example", "api.example/GET:/repos/*"]
# What is asked, whether it is allowed, and what the sentence has.
ROWS = (
    ("good.example", 0, "good.example:443 is allowed by good.example"),
    ("https://good.example/x", 0, "is allowed"),
    ("other.example:8443", 1, 'allow it with network_allow "other.example:8443"'),
    ("other.example", 1, "the user is asked when a program connects"),
    ("https://api.example/repos/me", 0, "is allowed"),
    ("https://api.example/keys", 1, "GET /keys is not allowed; the rules for this host are GET /repos/*"),
    ("telemetry.example", 1, "network_deny has telemetry.example"),
    (".env", 1, "names such as .env are hidden in a sandbox, if the user has them"),
    (".env.local", 1, "names such as .env.* are hidden"),
    ("src/id_rsa", 1, "names such as id_rsa are hidden"),
    ("src/new.py", 1, "it is not in the project, or the user hides it"),
    ("src/main.py", 0, "it is of the project: the user sees your changes"),
    ("/usr/bin/env", 1, "cannot be written: it is of a folder of the machine"),
    ("/opt/elsewhere", 1, "The user can show a folder with --also DIR"),
    ("/tmp", 0, "it is of the sandbox, and stays in it"),
)


def test_each_refusal_and_each_missing_path_has_its_sentence(tmp_path: Path) -> None:
    """Of a hidden file it says what it says of one that the user does not have; and it cannot be changed inside."""
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "main.py").write_text("")
    (project / ".env").write_text("TOKEN=1")  # there; .env.local is not

    async def main() -> None:
        sandbox = cloche.AsyncSandbox(
            workspace=str(project), network="allowlist", network_allow=RULES, network_deny=["telemetry.example"],
            on_network="ask", timeout=60,
        )  # fmt: skip
        give_why(sandbox, limit_lines(sandbox.policy, sandbox.limits, folder=str(project)))
        async with sandbox:
            asks = "".join(f"cloche-why {target}; echo $?; " for target, *_ in ROWS)
            *said, _ = (await sandbox.exec(shell=asks)).stdout.split("\n")
            for (target, code, text), why, ended in zip(ROWS, said[::2], said[1::2], strict=True):
                assert text in why, (target, why)
                assert int(ended) == code, (target, why)
            as_json = json.loads((await sandbox.exec(["cloche-why", "--json", "other.example"])).stdout)
            assert (as_json["host"], as_json["port"], as_json["is_allowed"]) == ("other.example", 443, False)
            assert "Hosts that you reach: good.example, api.example" in (await sandbox.exec(["cloche-why"])).stdout
            change = 'echo x > "$(command -v cloche-why)"; echo x > /etc/cloche/why.json; cat /etc/cloche/why.json'
            changed = await sandbox.exec(shell=change)
            assert changed.stderr.count("Read-only file system") + changed.stderr.count("Permission denied") == 2
            assert "id_rsa" in json.loads(changed.stdout)["hidden_names"]
            assert [row for row in await sandbox.network.traffic() if not row["is_allowed"]] == []

    asyncio.run(main())


def test_lines_that_are_no_question_get_no_answer() -> None:
    """The process that answers goes on."""
    program = """
import socket
for line in (b"x" * 9000, b"a b\\n", b"a 1 GET\\n", b"a 99999999 GET /\\n", b"\\xff 1\\n", b"good.example 443\\n"):
    with socket.create_connection(("198.18.0.1", 80), 20) as asking:
        try:
            asking.sendall(line)
            asking.shutdown(socket.SHUT_WR)
            print(len(asking.recv(9000)) > 0)
        except OSError:
            print(False)
"""
    with cloche.Sandbox(network_allow=["good.example"], timeout=60) as sandbox:
        assert sandbox.exec(["python3", "-c", program]).stdout.split() == ["False"] * 4 + ["True"] * 2
