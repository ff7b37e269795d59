"""What the SDK does by itself: signatures, conditions of readiness, clients with settings of their own."""

from __future__ import annotations

import e2b as core
import e2b_code_interpreter
from e2b import (
    AuthenticationException,
    default_build_logger,
    get_signature,
    wait_for_file,
    wait_for_port,
    wait_for_process,
    wait_for_timeout,
    wait_for_url,
)

from .both import Both
from .rows import shows


@shows("get_signature")
async def signatures(sdk: Both) -> None:
    """The SDK's signature is the one that the service compares, as in its signed addresses."""
    sandbox = await sdk.shared()
    token = sandbox._envd_access_token
    signature = get_signature("signed-by-hand", "write", None, token, 100)
    with sdk.service.http(**{"E2b-Sandbox-Id": sandbox.sandbox_id}) as client:
        query = {
            "path": "signed-by-hand", "signature": signature["signature"],
            "signature_expiration": str(signature["expiration"]),
        }  # fmt: skip
        answer = client.post("/files", params=query, files={"file": ("x", b"1")})
        assert answer.status_code == 200, answer.text
        assert client.get("/files", params=query).status_code == 401  # it was for writing


@shows("wait_for_file", "wait_for_port", "wait_for_process", "wait_for_timeout", "wait_for_url", is_long=True)
async def conditions(sdk: Both) -> None:
    """The command of each condition ends with 0 in a sandbox where it holds, and with another number where not."""
    sandbox = await sdk.shared()
    await sdk(sandbox.commands.run("touch /tmp/ready; python3 -m http.server 8765", background=True, timeout=0))
    fulfilled = (
        wait_for_file("/tmp/ready"), wait_for_port(8765), wait_for_process("python3"), wait_for_timeout(1_000),
        wait_for_url("http://localhost:8765/"),
    )  # fmt: skip
    for condition in fulfilled:
        command = f"for i in $(seq 50); do {condition.get_cmd()} && exit 0; sleep 0.1; done; exit 1"
        assert (await sdk(sandbox.commands.run(command))).exit_code == 0, condition.get_cmd()
    failing = (wait_for_file("/tmp/no"), wait_for_port(8766), wait_for_url("http://localhost:8766/"))
    for condition in failing:
        error = await sdk.raises(core.CommandExitException, lambda c=condition: sandbox.commands.run(c.get_cmd()))
        assert error.exit_code != 0


@shows("default_build_logger")
async def logger(sdk: Both) -> None:
    """It makes a function that takes lines of a build."""
    assert callable(default_build_logger())


@shows()
async def bound_client(sdk: Both) -> None:
    """A client with its own settings uses these, and a wrong key is told as that."""
    if not hasattr(e2b_code_interpreter.E2B, "__module__") or "code" not in e2b_code_interpreter.E2B.__module__:
        return
    client = e2b_code_interpreter.E2B(api_key=sdk.service.key, api_url=sdk.service.url, sandbox_url=sdk.service.url)
    kind = client.AsyncSandbox if sdk.is_async else client.Sandbox
    sandbox = await sdk(kind.create(timeout=60))
    assert (await sdk(sandbox.run_code("6 * 7"))).text == "42"
    await sdk(sandbox.kill())
    await sdk.raises(AuthenticationException, lambda: sdk.Sandbox.create(api_key="e2b_" + "0" * 40))
