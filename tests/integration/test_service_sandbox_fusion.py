"""`cloche serve --sandbox-fusion` for the callers of SandboxFusion, unmodified; and against who attacks it."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.harness.callers import sandbox_fusion_client, verl_rewards, with_key
from tests.harness.service import Service, serving

MIB = 1 << 20
SLEEP = "import time\nprint('begun', flush=True)\ntime.sleep(600)"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve in this mode."""
    with serving(tmp_path_factory.mktemp("fusion"), "--sandbox-fusion") as one:
        yield one


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    """Be a client with a key that may run code and read."""
    with service.client(service.new_key("run", "read")) as one:
        yield one


@pytest.fixture
def sandbox_fusion(service: Service, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the published client, told of the service by an address with a key in it."""
    module = sandbox_fusion_client()
    monkeypatch.setattr(module.client.config, "SANDBOX_ENDPOINT", "")
    module.set_sandbox_endpoint(with_key(service.address, service.new_key("run")))
    return module


@pytest.fixture
def run(client: httpx.Client) -> Callable[..., dict[str, Any]]:
    """Return a function that posts a request and returns the answer."""

    def post(path: str = "/run_code", **fields: Any) -> dict[str, Any]:
        answer = client.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    return post


def _until(holds: Callable[[], bool], seconds: float = 60) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_their_client_gets_what_their_server_answers(sandbox_fusion: Any) -> None:
    """Success, an exit code, a time-out with the output until then, a language that is not there, input and files."""
    fusion, ask = sandbox_fusion, sandbox_fusion.RunCodeRequest
    mapping = fusion.SummaryMapping(RunTimeout="late", RunFailed="failed", CompileFailed="not compiled")
    told = fusion.run_code(ask(code="print(input())", language="python", stdin="in"), max_attempts=1)
    assert (told.status, told.run_result.status, told.run_result.return_code) == ("Success", "Finished", 0)
    assert (told.run_result.stdout, told.compile_result) == ("in\n", None)
    assert 0 < told.run_result.execution_time < 60
    told = fusion.run_code(ask(code="exit 3", language="bash"), max_attempts=1)
    assert (fusion.summary_run_code_result(told, mapping), told.run_result.return_code) == ("failed", 3)
    told = fusion.run_code(ask(code=SLEEP, language="python", run_timeout=0.5), max_attempts=1)
    assert (fusion.summary_run_code_result(told, mapping), told.run_result.stdout) == ("late", "begun\n")
    assert told.run_result.return_code is None
    told = fusion.run_code(ask(code="class A {}", language="java"), max_attempts=1)
    assert (told.status, told.run_result.return_code) == ("Failed", 127)
    assert "language 'java' is not there; this service runs python" in told.message
    code = "open('out/x', 'w').write(open('in/a').read() * 2)"
    files = {"in/a": base64.b64encode(b"hi").decode(), "out/keep": "", "left": None}
    fetched = ["out/x", "in/a", "missing", "../../etc/shadow", "out"]
    told = fusion.run_code(ask(code=code, language="python", files=files, fetch_files=fetched), max_attempts=1)
    assert {name: base64.b64decode(data) for name, data in told.files.items()} == {"out/x": b"hihi", "in/a": b"hi"}


CPP = (
    '#include <cstdio>\nint main(){int a; std::scanf("%d",&a); std::printf("%d\\n",a*2);}',
    "int main(){",
    "int main(){volatile int a=0;for(;;)a=a+1;}",
)
RUST_SOURCE = """
fn main() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    println!("{}", line.trim().parse::<i32>().unwrap() * 2);
}
"""
RUST = (RUST_SOURCE, "fn main(){", "fn main(){loop{std::hint::spin_loop()}}")


@pytest.mark.parametrize(("language", "programs"), [("cpp", CPP), ("rust", RUST)], ids=("cpp", "rust"))
def test_what_is_compiled_has_two_results(
    run: Callable[..., dict[str, Any]], language: str, programs: tuple[str, str, str]
) -> None:
    """Each with its own time limit; the program's begins after the compiler."""
    good, bad, late = programs
    told = run(code=good, language=language, stdin="21", compile_timeout=60)
    assert (told["status"], told["compile_result"]["return_code"], told["run_result"]["stdout"]) == (
        "Success",
        0,
        "42\n",
    )
    told = run(code=bad, language=language, compile_timeout=60)
    assert (told["status"], told["run_result"], told["compile_result"]["status"]) == ("Failed", None, "Finished")
    assert told["compile_result"]["return_code"] != 0
    assert "cloche-code" in told["compile_result"]["stderr"]
    told = run(code=late, language=language, compile_timeout=60, run_timeout=0.2)
    assert (told["compile_result"]["return_code"], told["run_result"]["status"]) == (0, "TimeLimitExceeded")
    told = run(code=good, language=language, compile_timeout=0.01)
    assert (told["compile_result"]["status"], told["run_result"]) == ("TimeLimitExceeded", None)


def test_cells_share_an_interpreter(sandbox_fusion: Any) -> None:
    """With rich outputs, errors after which the next cell runs, files, and time limits of a cell and of all."""
    fusion, ask = sandbox_fusion, sandbox_fusion.RunJupyterRequest
    html = "class A:\n    def _repr_html_(self): return '<b>a</b>'\nA()"
    cells = [
        "a = 1",
        "a + 1",
        html,
        "import sys; print('o'); print('e', file=sys.stderr)",
        "1 / 0",
        "open('f','w').write('x')",
    ]
    told = fusion.run_jupyter(ask(cells=cells, fetch_files=["f"]), max_attempts=1)
    assert (told.status, told.driver.status, told.files) == ("Success", "Finished", {"f": "eA=="})
    assert [cell.display[0].get("text/plain") for cell in (told.cells[1], told.cells[5])] == ["2", "1"]
    assert told.cells[2].display[0]["text/html"] == "<b>a</b>"
    assert (told.cells[3].stdout, told.cells[3].stderr) == ("o\n", "e\n")
    (error,) = told.cells[4].error
    assert (error["ename"], error["evalue"], told.cells[4].stderr) == ("ZeroDivisionError", "division by zero", "")
    told = fusion.run_jupyter(ask(cells=["print(1)", "while True: pass", "2"], cell_timeout=0.5), max_attempts=1)
    assert (told.status, told.driver.status, len(told.cells)) == ("Failed", "TimeLimitExceeded", 2)
    told = fusion.run_jupyter(ask(cells=["import os; os._exit(3)", "2"]), max_attempts=1)
    assert (told.status, told.driver.return_code, len(told.cells)) == ("Failed", 3, 1)


def test_their_asynchronous_client_is_answered_too(sandbox_fusion: Any) -> None:
    """Many at once."""
    requests = [sandbox_fusion.RunCodeRequest(code=f"print({n})", language="python") for n in range(12)]

    async def main() -> list[Any]:
        return await asyncio.gather(*(sandbox_fusion.run_code_async(one, max_attempts=1) for one in requests))

    assert [told.run_result.stdout for told in asyncio.run(main())] == [f"{n}\n" for n in range(12)]


def test_verl_scores_programs_right(service: Service) -> None:
    """Right, wrong, an exit code, late, asserts, a function; and a wrong key is no wrong answer of the program's."""
    verl, url = verl_rewards(), with_key(service.address, service.new_key("run")) + "/run_code"
    cases = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}

    def score(code: str, cases: dict[str, Any] = cases, url: str = url) -> tuple[float, list[str]]:
        value, rows = verl.compute_score(url, None, 1024, f"```python\n{code}\n```", dict(cases), timeout=10)
        return value, [row["status"] for row in rows]

    assert score("print(int(input()) * 2)") == (1.0, ["success"] * 2)
    assert score("print(2)") == (0.5, ["success", "wrong_answer"])
    assert score("raise SystemExit(1)") == (0.0, ["runtime_error"] * 2)
    asserts = {"assert_case": ["assert f(1) == 2", "assert f(2) == 3"]}
    assert score("def f(n): return 2", asserts) == (0.5, ["success", "runtime_error"])
    function = {"inputs": ["[1, 2]"], "outputs": ["3"], "fn_name": "add"}
    assert score("def add(a):\n    return sum(a)", function) == (1.0, ["success"])
    assert score("pass", url=with_key(service.address, "wrong") + "/run_code") == (0.0, ["api_error"] * 2)
    value, rows = verl.compute_score(url, None, 1024, f"```python\n{SLEEP}\n```", dict(cases), timeout=1)
    assert (value, [row["status"] for row in rows]) == (0.0, ["timeout"] * 2)


def test_who_finds_no_place_in_time_is_told_that_nothing_ran(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With 504, the one status after which verl tries again; then there is a place, and the score is right."""
    verl, cases = verl_rewards(), {"inputs": [""], "outputs": ["ran"]}
    told: list[Any] = []
    with serving(tmp_path_factory.mktemp("full"), "--sandbox-fusion", "--queue", "4") as full, full.client() as client:
        url, body = with_key(full.address, full.key) + "/run_code", {"code": SLEEP, "timeout": "10m"}
        headers = {"Prefer": "respond-async"}
        while (held := client.post("/api/code/exec", json=body, headers=headers)).status_code != 503:
            assert held.status_code == 202, held.text
        holding, began = [row["id"] for row in _runs(client)], time.monotonic()
        score = threading.Thread(
            target=lambda: told.append(verl.compute_score(url, None, 1024, "```\nprint('ran')\n```", cases, timeout=1))
        )
        score.start()
        _until(lambda: '"status":504' in full.log.read_text())
        assert time.monotonic() - began > 8.9  # verl waits for 12 s; 1 s is the program's, 2 s are spare
        assert [row["id"] for row in _runs(client)] == holding
        for run_id in holding:
            client.post(f"/api/runs/{run_id}/cancel")
        score.join()
        assert told[0][0] == 1.0, told
        _until(lambda: [row["status"] for row in _runs(client)].count("ok") == 1)


def _runs(client: httpx.Client) -> list[dict[str, Any]]:
    return list(client.get("/api/runs?limit=200").raise_for_status().json()["items"])


def test_a_client_that_goes_away_takes_its_run_with_it(service: Service, client: httpx.Client) -> None:
    """It is cancelled, and its record says so."""
    where, body = urlsplit(service.address), json.dumps({"code": SLEEP, "language": "python", "run_timeout": 300})
    credentials = base64.b64encode(f"any:{service.new_key('run')}".encode()).decode()
    with socket.create_connection((where.hostname, where.port)) as link:
        head = f"POST /run_code HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Basic {credentials}\r\n"
        link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        _until(lambda: any(row["status"] == "running" for row in _runs(client)))
    _until(lambda: all(row["status"] != "running" for row in _runs(client)))
    assert "cancelled" in [row["status"] for row in _runs(client)]


def test_the_modes_own_limits(run: Callable[..., dict[str, Any]], client: httpx.Client) -> None:
    """Output is whole up to 8 MiB, memory is as asked for up to 1 GiB, and one processor; what is lowered is said."""
    told = run(code=f"print('x' * ({8 * MIB} - 1))", language="python")
    assert (told["status"], len(told["run_result"]["stdout"]), told["message"]) == ("Success", 8 * MIB, "")
    told = run(code=f"print('x' * {9 * MIB})", language="python")
    assert (told["status"], told["message"]) == ("Success", "its output was cut")
    told = run(code="x = bytearray(400 << 20)", language="python", memory_limit_MB=4096, run_timeout=1000)
    assert told["status"] == "Success"
    assert told["message"].split("; ") == [
        "memory_limit_MB: 4096 was lowered to the service's 1GiB",
        "run_timeout: 1000 s was lowered to the service's 300 s",
    ]
    told = run(code="x = bytearray(400 << 20)", language="python", memory_limit_MB=100)
    assert (told["status"], told["run_result"]["return_code"]) == ("Failed", 137)
    assert "memory limit" in told["message"]
    _until(lambda: len(_runs(client)) >= 4)
    kept = client.get("/api/runs?limit=200").json()["items"]
    limits = [row["meta"]["limits"] for row in kept if "meta" in row]
    assert {(row["cpus"], row["output_bytes"]) for row in limits} == {(1, 8 * MIB)}
    assert all(len(row.get("stdout", "")) <= 2048 for row in kept)  # a record is no copy of 8 MiB


def test_what_can_never_run_is_failed_at_once(run: Callable[..., dict[str, Any]]) -> None:
    """With a sentence where each client shows it, and never for lack of an answer."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"files": {"a": "%%"}}, "base64"),
        ({"files": {"../../a": "aGk="}}, "below /workspace"),
        ({"language": "no\n" * 20}, "is not there"),
        ({"language": "csharp"}, "is not there"),
    ]
    for fields, why in wrong:
        told = run(**{"code": "print(1)", "language": "python", **fields})
        assert told["status"] == "Failed"
        assert why in told["message"]
        assert told["run_result"]["return_code"] in (126, 127)
        assert told["run_result"]["stderr"] == told["message"]
    told = run("/run_jupyter", cells=["1"], kernel="ir")
    assert (told["status"], told["driver"]["return_code"]) == ("Failed", 127)


def test_bodies_of_attackers(service: Service, client: httpx.Client) -> None:
    """Each is refused for what it is, and the service goes on."""
    good = {"code": "print(1)", "language": "python"}
    fields: list[tuple[dict[str, Any], int]] = [
        ({"run_timeout": 1e400}, 422), ({"run_timeout": -1}, 422), ({"files": {"a": {"b": 1}}}, 422),
        ({"files": {str(n): 1 for n in range(9_000)}}, 422), ({"fetch_files": ["a"] * 300}, 422),
        ({"fetch_files": list(range(30_000))}, 413), ({"x": "y" * (33 * MIB)}, 413), ({"memory_limit_MB": 1e308}, 200),
        ({"new": [1]}, 200), ({"code": "print(1)\0"}, 200), ({"stdin": "\0"}, 200),
    ]  # fmt: skip
    bodies = [(json.dumps({**good, **more}).encode(), status) for more, status in fields]
    bodies += [(body, 422) for body in (b"", b"[]", b'"x"', b"{", b"[" * 10_000, b"\xff" * 10)]
    for body, status in bodies:
        for path in ("/run_code", "/run_jupyter"):
            answer = client.post(path, content=body)
            wanted = {200: 422}.get(status, status) if path == "/run_jupyter" else status  # it has no cells
            assert answer.status_code == wanted, (path, body[:60], answer.text[:200])
    many = b'{"code": "1", "language": "python", "x": [' + b"{}," * 400_000 + b"{}]}"
    for kind in ("multipart/form-data; boundary=b", "application/x-www-form-urlencoded", "text/plain"):
        for body in (many, json.dumps(good).encode()):  # as a form, its values are not counted
            answer = client.post("/run_code", content=body, headers={"Content-Type": kind})
            assert answer.status_code == (413 if (kind, body) == ("text/plain", many) else 415), kind
    assert "an unexpected error" not in service.log.read_text()
    assert client.get("/v1/ping").json() == "pong"


def test_the_key_in_an_address_counts_on_these_routes_alone(service: Service, client: httpx.Client) -> None:
    """Nor does a page of another site use what a browser remembers; a key that may not run code is told so."""
    good = {"code": "print(1)", "language": "python"}
    pair, reader = ("any", service.new_key("run", "read")), ("any", service.new_key("read"))
    with service.client("") as nobody:
        assert nobody.post("/run_code", json=good, auth=pair).status_code == 200
        assert nobody.get("/api/runs", auth=pair).status_code == 401
        assert nobody.post("/run_code", json=good, auth=pair, headers={"Origin": "http://a.example"}).status_code == 403
        assert nobody.post("/run_code", json=good, auth=reader).status_code == 403
        for header in ("Basic", "Basic %%", "Basic aGk=", "Basic " + "A" * 4096, "Digest x"):
            assert nobody.post("/run_code", json=good, headers={"Authorization": header}).status_code == 401
        assert nobody.post("/run_code", json=good).status_code == 401


def test_without_the_mode_there_are_no_such_routes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nor Basic credentials."""
    with serving(tmp_path_factory.mktemp("plain")) as plain, plain.client() as client:
        assert client.post("/run_code", json={"code": "1", "language": "python"}).status_code == 404
        with plain.client("") as nobody:
            assert nobody.post("/api/code/exec", json={"code": "1"}, auth=("any", plain.key)).status_code == 401
