"""Clients that trust the authority of their sandbox, unmodified: by its variables, and without any of them.

`make soak AREA=network` runs these with the packages of requirements/frameworks/clients.txt, Bun among them.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.internet.build import SYSTEM_PATH
from tests.harness.world import NAMES, PUBLIC, World, open_world

pytestmark = [pytest.mark.soak, pytest.mark.toolchain]
HOST = "api.anthropic.com"
VALUE = "sk-ant-api03-RealValue0123456789abcdefXYZ"
URL = f"https://{HOST}/plain"
PATH = f"{Path(sys.executable).parent}:{SYSTEM_PATH}:{Path(__file__).parents[2] / '.toolchains' / 'bin'}"
GO = """
package main
import ("fmt"; "io"; "net/http"; "os")
func main() {
    request, _ := http.NewRequest("GET", os.Args[1], nil)
    request.Header.Set("x-api-key", os.Getenv("ANTHROPIC_API_KEY"))
    answer, err := http.DefaultClient.Do(request)
    if err != nil { fmt.Println(err); os.Exit(1) }
    text, _ := io.ReadAll(answer.Body)
    fmt.Println(string(text))
}
"""
JAVA = """
import java.net.URI; import java.net.http.*;
public class Main { public static void main(String[] words) throws Exception {
    var request = HttpRequest.newBuilder(URI.create(words[0])).header("x-api-key", System.getenv("ANTHROPIC_API_KEY"));
    System.out.println(HttpClient.newHttpClient().send(request.build(), HttpResponse.BodyHandlers.ofString()).body());
} }
"""


def fetch(key: str) -> str:
    """Return a program that asks with `fetch`."""
    return f"fetch('{URL}', {{headers: {{'x-api-key': {key}}}}}).then(a => a.text()).then(console.log)"


def python(code: str) -> str:
    """Return the command of a program of Python's, which has the URL and the headers."""
    head = f"import os\nurl, headers = {URL!r}, {{'x-api-key': os.environ['ANTHROPIC_API_KEY']}}\n"
    return f"python3 -c {shlex.quote(head + code)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Say how a client is used, whether it trusts the authority without variables, and the program that it needs."""

    command: str
    program: str = "python3"
    without: bool = True


CLIENTS: Mapping[str, Client] = {
    "ssl of Python": Client(
        command=python("import urllib.request as u\nprint(u.urlopen(u.Request(url, headers=headers)).read().decode())")
    ),
    "requests": Client(
        command=python("import requests\nprint(requests.get(url, headers=headers).text)"), without=False
    ),
    "httpx": Client(command=python("import httpx\nprint(httpx.get(url, headers=headers).text)"), without=False),
    "aiohttp": Client(
        command=python(
            "import aiohttp, asyncio\nasync def main():\n    async with aiohttp.ClientSession() as opened:\n"
            "        print(await (await opened.get(url, headers=headers)).text())\nasyncio.run(main())"
        ),
    ),
    "curl": Client(command=f'curl -sS -H "x-api-key: $ANTHROPIC_API_KEY" {URL}', program="curl"),
    "wget": Client(command=f'wget -qO- --header "x-api-key: $ANTHROPIC_API_KEY" {URL}', program="wget"),
    "Node": Client(
        command=f"node -e {shlex.quote(fetch('process.env.ANTHROPIC_API_KEY'))}", program="node", without=False
    ),
    "Bun": Client(
        command=f"bun -e {shlex.quote(fetch('process.env.ANTHROPIC_API_KEY'))}", program="bun", without=False
    ),
    "Go": Client(command=f"go run main.go {URL}", program="go"),
    "Ruby": Client(
        command="ruby -e " + shlex.quote(
            f"require 'net/http'; puts Net::HTTP.get(URI('{URL}'), {{'x-api-key' => ENV['ANTHROPIC_API_KEY']}})"
        ),
        program="ruby",
    ),
    "Java": Client(command=f"java Main.java {URL}", program="java", without=False),
}  # fmt: skip
RUN = """
import cloche, os
os.environ["ANTHROPIC_API_KEY"] = ARGUMENT["value"]
options = {"timeout": 120, "memory": "2g", "pids": 512, "disk": "2g", "env": {"PATH": ARGUMENT["path"]}}
with cloche.Sandbox(live=True, secrets=["ANTHROPIC_API_KEY"], **options) as sandbox:
    for name, text in ARGUMENT["files"].items():
        sandbox.write_file(name, text)
    results = [sandbox.exec(["sh", "-c", code]) for code in ARGUMENT["codes"]]
print(json.dumps([result.stdout + result.stderr for result in results]))
"""


# Where a file of the checkout is no program of a live sandbox.
AS_LANGUAGE = """
import cloche, os
os.environ["ANTHROPIC_API_KEY"] = ARGUMENT["value"]
result = cloche.run(ARGUMENT["code"], language="deno", secrets=["ANTHROPIC_API_KEY"], memory="2g", timeout=60)
print(json.dumps(result.stdout + result.stderr))
"""
IS_TRUSTED = "x-api-key: sk-ant-api03-"
CLEANED = 'env -i "PATH=$PATH" "HOME=$HOME" "ANTHROPIC_API_KEY=$ANTHROPIC_API_KEY" '


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with a provider."""
    with open_world({**NAMES, HOST: [[PUBLIC]]}) as world:
        yield world


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_trusts_the_authority_of_its_sandbox(world: World, name: str) -> None:
    """With the sandbox's variables, and in a cleaned environment where the client reads the system's bundle."""
    client = CLIENTS[name]
    if shutil.which(client.program, path=PATH) is None:
        pytest.skip(f"missing: {client.program}")
    by_variables, without = run(world, client.command, f"{CLEANED} sh -c {shlex.quote(client.command)}")
    assert (IS_TRUSTED in by_variables) == (name != "Java"), by_variables
    assert (IS_TRUSTED in without) == client.without, without


def run(world: World, *codes: str) -> list[str]:
    """Return the output of some commands in one sandbox."""
    argument = {"value": VALUE, "path": PATH, "codes": codes, "files": {"main.go": GO, "Main.java": JAVA}}
    outputs: list[str] = world.run(RUN, argument)
    assert VALUE not in str(outputs)
    return outputs


def test_deno_trusts_the_authority_of_its_sandbox(world: World) -> None:
    """By its own variable."""
    code = fetch("Deno.env.get(`ANTHROPIC_API_KEY`)")
    assert IS_TRUSTED in world.run(AS_LANGUAGE, {"value": VALUE, "code": code}, env={"PATH": PATH})


def test_programs_in_rust_trust_it_unless_their_roots_are_compiled_in(world: World) -> None:
    """Uv can do both: it has roots of its own, and reads the system's, or those of a variable."""
    uv = f"uv --no-cache pip install --target t --index-url https://{HOST}/simple/ nothing"
    by_variables, own, of_system = run(world, uv, f"{CLEANED} {uv}", f"{CLEANED} UV_SYSTEM_CERTS=1 {uv}")
    assert "UnknownIssuer" in own
    for output in (by_variables, of_system):
        assert "`Content-Type`" in output, output  # of an answer that is no index


def test_a_folder_of_hashed_certificates_does_not_have_it(world: World) -> None:
    """OpenSSL finds it in the system's bundle, and not where it is told to look in the folder alone."""
    asks = f"echo | openssl s_client -connect {HOST}:443"
    bundle, folder = run(world, f"{CLEANED} {asks} 2>&1", f"{asks} -no-CAfile -CApath /etc/ssl/certs 2>&1")
    assert "Verification: OK" in bundle
    assert "unable to verify the first certificate" in folder
