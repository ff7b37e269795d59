"""What an operator's host has of its own, and what a result says: an upstream proxy, an authority, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.world import METADATA, NAMES, PUBLIC, World, open_world

PROXY = "10.20.30.40"
TABLE = {**NAMES, "inside.corp": [["10.5.5.5"]], "meta.example": [[METADATA]]}
RUN = """
import cloche
result = cloche.run(ARGUMENT["code"], level="jail", timeout=60, **ARGUMENT["policy"])
control = result.enforcement.controls["network"]
print(json.dumps({
    "out": result.stdout, "status": str(result.status), "exit_code": result.exit_code, "state": str(control.state),
    "reason": control.reason, "rows": result.meta.get("network", []), "hits": dict(result.enforcement.hits),
}))
"""
LATER = """
import cloche
with cloche.Sandbox(network="allowlist", timeout=60, **ARGUMENT["policy"]) as sandbox:
    before = sandbox.run(ARGUMENT["code"])
    sandbox.network.allow("good.example")
    after = sandbox.run(ARGUMENT["code"])
print(json.dumps([
    [one.stdout.split(), [row["is_allowed"] for row in one.meta.get("network", [])]] for one in (before, after)
]))
"""
FETCH = """
import urllib.error, urllib.request
for url in {urls!r}:
    try:
        print(urllib.request.urlopen(url, timeout=10).read().decode().strip())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except OSError as error:
        print("refused")
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world."""
    with open_world(TABLE) as world:
        yield world


def run(world: World, code: str, *, env: dict[str, str] | None = None, **policy: Any) -> Any:
    """Run a program in a sandbox on the host, with a new record."""
    world.forget()
    return world.run(RUN, {"code": code, "policy": {"network": "allowlist", **policy}}, env=env)


def test_an_upstream_proxy_of_the_operator_is_used(world: World) -> None:
    """Names go to it unresolved; addresses and private names do not; and the result says that it is between."""
    proxy = f"http://{PROXY}:3128"
    urls = ("http://good.example/", "https://good.example/", "http://8.8.8.8/", "http://inside.corp/")
    found = run(
        world,
        FETCH.format(urls=urls),
        env={"HTTPS_PROXY": proxy, "http_proxy": proxy},
        network_allow=["good.example", "inside.corp", "8.8.8.8:80"],
    )
    by_name = [f"HELLO from {PUBLIC}:{port} for good.example" for port in (80, 443)]
    lines = found["out"].splitlines()
    assert lines[:2] == by_name
    assert [line.split()[0] for line in lines[2:]] == ["403", "403"]
    assert (found["state"], "upstream proxy" in found["reason"]) == ("partial", True)
    assert world.seen().endpoints == {("tcp", PROXY, 3128)}
    assert world.seen().names == set()


def test_a_guest_is_shown_an_authority_of_the_operator(world: World) -> None:
    """The file that a variable names can be read in a guest, and not written, and its servers are trusted."""
    world.run("import shutil\nshutil.copy('/etc/ssl/certs/ca-certificates.crt', 'own.pem')\nprint(0)")
    looks = "print(os.access(path, os.R_OK), os.access(path, os.W_OK), path)\n"
    code = "import os\npath = os.environ['SSL_CERT_FILE']\n" + looks + FETCH.format(urls=("https://good.example/",))
    first, answer = run(world, code, env={"SSL_CERT_FILE": "own.pem"}, network_allow=["good.example"])[
        "out"
    ].splitlines()
    assert first.startswith("True False /etc/")
    assert answer.startswith("HELLO")


@pytest.mark.parametrize("given", [[], ["db.example:5432"]])
def test_a_list_that_names_nobody_can_be_added_to_later(world: World, given: list[str]) -> None:
    """Until then nothing is reached, and that is said; from then on that host is, and no other."""
    world.forget()
    code = FETCH.format(urls=("http://good.example/", "http://8.8.8.8/"))
    before, after = world.run(LATER, {"code": code, "policy": {"network_allow": given}})
    assert (before[0][0], before[1]) == ("refused", [False, False])
    assert after[0][0] == "HELLO"
    assert sorted(after[1]) == [False, True]
    assert {address for _, address, port in world.seen().endpoints if port == 80} == {PUBLIC}


@pytest.mark.parametrize("exit_code", [0, 3])
def test_what_was_refused_is_said(world: World, exit_code: int) -> None:
    """Plain HTTP reads why, the rows say it again, and only a run that failed is denied."""
    code = FETCH.format(urls=("http://meta.example/", f"http://{METADATA}/")) + f"\nraise SystemExit({exit_code})"
    found = run(world, code, network_allow=["meta.example"])
    by_name, by_address = found["out"].splitlines()
    assert by_name.startswith("403 meta.example:80 is not allowed; it resolves to 169.254.169.254")
    assert by_address.startswith("403 169.254.169.254:80")
    assert [(row["host"], row["port"], row["is_allowed"]) for row in found["rows"]] == [
        ("meta.example", 80, False),
        (METADATA, 80, False),
    ]
    assert [f"403 {row['why']}" for row in found["rows"]] == [by_name, by_address]
    assert found["hits"] == {"network": 2}
    assert (found["status"], found["exit_code"]) == ("denied" if exit_code else "ok", exit_code)


def test_bytes_are_counted(world: World) -> None:
    """What a guest sends and receives is in the row of its host."""
    code = FETCH.format(urls=("http://good.example/bytes/300000",)).replace(".decode().strip()", "[:1]")
    (row,) = run(world, code, network_allow=["good.example"])["rows"]
    assert (row["host"], row["port"], row["is_allowed"], row["connections"], row["why"]) == (
        "good.example", 80, True, 1, "",
    )  # fmt: skip
    assert 300_000 <= row["received"] < 301_000
    assert 50 <= row["sent"] < 1000
