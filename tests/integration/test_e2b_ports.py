"""Ports of E2B's sandboxes: requests and web sockets through them, tokens, and what neither side can do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import websockets

from cloche.serving.certificate import keep_certificate
from tests.harness import e2b

PROGRAM = Path(__file__).parents[1] / "harness/programs/any_answer.py"
CLOSED = "The sandbox is running but port is not open"
GONE = "The sandbox was not found"
OK = "HTTP/1.1 200 OK\r\n"


class Sandboxes:
    """A service, and two of its sandboxes: a public one, and one whose ports need a token. Each has the server."""

    def __init__(self, served: e2b.E2BService) -> None:
        self.served = served
        self.key = {"X-API-KEY": served.key}
        self.public, self.private = self.create(), self.create(allowPublicTraffic=False)

    def create(self, *words: str, **network: object) -> dict[str, str]:
        """Create a sandbox, and start the server in it with these arguments."""
        with self.served.http(**self.key) as http:
            made: dict[str, str] = http.post("/v2/sandboxes", json={"templateID": "base", "network": network}).json()
        with self.served.service.client() as api:
            argv = ["python3", "-c", PROGRAM.read_text(), *words]
            api.post(f"/api/sandboxes/sb_{made['sandboxID']}/processes", json={"argv": argv}).raise_for_status()
        return made

    def headers(self, port: int = 8000, **others: str) -> dict[str, str]:
        """Return the headers that name a port of the public sandbox."""
        return {"E2b-Sandbox-Id": self.public["sandboxID"], "E2b-Sandbox-Port": str(port), **others}

    @contextmanager
    def http(self, **headers: str) -> Iterator[httpx.Client]:
        """Open a client of the server in the public sandbox."""
        with self.served.http(**{**self.headers(), **headers}) as http:
            yield http

    def raw(self, request: str) -> tuple[int, str]:
        """Send bytes; return the status and the rest of the answer, to its end or the connection's."""
        host, _, port = self.served.url.partition("//")[2].partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(request.format(**self.public).encode("latin-1"))
            data = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode("latin-1")
        return int(data.split(" ")[1]), data


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandboxes]:
    """Serve with two sandboxes."""
    with e2b.serving(
        tmp_path_factory.mktemp("ports"), "--domain", "e2b.test", "--trusted-proxy", "127.0.0.1"
    ) as served:
        yield Sandboxes(served)


def test_a_request_reaches_the_server_as_it_was_sent_but_for_what_is_ours(boxes: Sandboxes) -> None:
    """Credentials of this service, headers of the connection, and who forwarded it are not passed on."""
    with boxes.http() as http:
        ours = {
            "X-Access-Token": boxes.public["envdAccessToken"], "X-API-KEY": boxes.served.key,
            "E2b-Traffic-Access-Token": "a", "Connection": "Named", "Named": "a", "X-Forwarded-For": "192.0.2.1",
        }  # fmt: skip
        seen = http.get("/path%2Fa//b?c=%20d", headers=ours).text
        theirs = {"X-Access-Token": "of-the-guest", "Authorization": "Bearer its-own", "Cookie": "a=b"}
        kept = http.get("/", headers=theirs).text
        seen += http.get("/", headers={"X-API-KEY": "cloche_key", "Authorization": "Bearer cloche_key"}).text
        head = http.head("/")
    lines = seen.splitlines()
    assert lines[0] == "GET /path%2Fa//b?c=%20d HTTP/1.1"
    assert f"Host: {boxes.served.url.partition('//')[2]}" in lines
    assert not [word for word in ("e2b_", "cloche_", "Access-Token", "Named", "Forwarded") if word in seen]
    assert all(f"{name}: {value}" in kept for name, value in theirs.items())
    assert (head.status_code, head.headers["x-seen"], head.text) == (200, "yes", "")


def test_bodies_of_any_size_pass_with_either_framing(boxes: Sandboxes) -> None:
    """20 MB with a length, and 10 MB in chunks."""
    with boxes.http() as http:
        assert http.post("/sum", content=b"a" * 20_000_000).text == "20000000"
        assert http.post("/sum", content=(b"a" * 100_000 for _ in range(100))).text == "10000000"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (OK + "Content-Length: 2\r\n\r\nok", 200),
        ("HTTP/1.0 200 OK\r\n\r\nok", 200),
        ("HTTP/1.1 103 Early\r\n\r\n" * 3 + OK + "\r\nok", 200),
        ("HTTP/1.1 103 Early\r\n\r\n" * 100 + OK + "\r\nok", 502),
        (OK + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 502),
        (OK + "Content-Length: 2\r\nContent-Length: 3\r\n\r\nok", 502),
        (OK + "Content-Length: -1\r\n\r\nok", 502),
        (OK + "Transfer-Encoding: gzip, chunked\r\n\r\nok", 502),
        (OK + "A: b\rContent-Length: 0\r\n\r\n", 502),
        (OK + "A: b\r\n c\0d\r\n\r\n", 502),
        ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: other\r\n\r\n", 502),
        ("no HTTP\r\n\r\n", 502),
        (OK, 502),
        ("", 502),
    ],
)  # fmt: skip
def test_an_answer_with_two_meanings_is_none(boxes: Sandboxes, answer: str, status: int) -> None:
    """The client gets 502 for all that is not one answer, and nothing of it; the next request has its own answer."""
    with boxes.http() as http:
        got = http.get(f"/raw?{quote(answer)}")
        assert got.status_code == status, got.text
        assert got.text == "ok" if status == 200 else got.json()["message"] == CLOSED
        assert http.get("/next").text.startswith("GET /next")


@pytest.mark.parametrize(
    "answer", [OK + "Content-Length: 9\r\n\r\nok", OK + "Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"]
)
def test_a_body_that_breaks_off_does_not_look_ended(boxes: Sandboxes, answer: str) -> None:
    """The client's connection breaks, too."""
    with boxes.http() as http, pytest.raises(httpx.ReadError):
        http.get(f"/raw?{quote(answer)}")


def test_heads_without_end_are_bounded(boxes: Sandboxes) -> None:
    """Headers without end are 502 at once."""
    with boxes.http() as http:
        assert http.get(f"/flood?{quote(OK + 'A: b' + chr(13) + chr(10))}").status_code == 502


NAMES = "E2b-Sandbox-Id: {sandboxID}\r\nE2b-Sandbox-Port: 8000\r\n"
BODY = "POST /sum HTTP/1.1\r\nHost: a\r\n" + NAMES
LINE = "GET / HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (LINE + "Host: 8000-{sandboxID}.e2b.test\r\n\r\n", 200),
        (LINE + "Host: 8000-{sandboxID}.e2b.test:3000\r\n\r\n", 200),
        (LINE + "Host: 8000-{sandboxID}.E2B.TEST\r\n\r\n", 200),
        (LINE + "Host: sandbox.e2b.test\r\n" + NAMES + "\r\n", 200),
        (LINE + "Host: 8000-{sandboxID}.e2b.test\r\n" + NAMES + "\r\n", 200),
        (LINE + "Host: 8001-{sandboxID}.e2b.test\r\n" + NAMES + "\r\n", 400),
        (LINE + "Host: 8000-other.e2b.test\r\n" + NAMES + "\r\n", 400),
        (LINE + "Host: 8000-{sandboxID}.e2b.test\r\nHost: other\r\n\r\n", 400),
        (LINE + "Host: localhost\r\n" + NAMES + NAMES + "\r\n", 400),
        (LINE + "Host: localhost\r\nE2b-Sandbox-Id: ../x\r\n\r\n", 400),
        (LINE + "Host: localhost\r\nE2b-Sandbox-Id: {sandboxID}\r\nE2b-Sandbox-Port: 99999\r\n\r\n", 400),
        (LINE + "Host: 8000-{sandboxID}.other.test\r\n\r\n", 404),
        (LINE + "Host: 8000-none.e2b.test\r\n\r\n", 502),
        ("GET http://8000-{sandboxID}.e2b.test/ HTTP/1.1\r\nHost: localhost\r\n" + NAMES + "\r\n", 400),
        ("CONNECT a.example:80 HTTP/1.1\r\nHost: localhost\r\n" + NAMES + "\r\n", 400),
        (BODY + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (BODY + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", 400),
        (BODY + "Content-Length : 5\r\n\r\nabcde", 400),
        (BODY + "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
        (LINE + "Host: a\r\n" + NAMES + "A: b\rGET /smuggled HTTP/1.1\r\n\r\n", 400),
        (LINE + "Host: a\r\n" + NAMES + " folded: b\r\n\r\n", 400),
    ],
)  # fmt: skip
def test_a_request_has_one_meaning(boxes: Sandboxes, request_text: str, status: int) -> None:
    """What two readers could read in two ways is refused; host names and headers are read as E2B's proxy does."""
    got, text = boxes.raw(request_text.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1))
    assert got == status, text
    assert "smuggled" not in text


def test_errors_are_those_of_e2bs_proxy(boxes: Sandboxes) -> None:
    """JSON, for a browser a page, for a preflight success; scripts of any origin may read them."""
    with boxes.http(**{"E2b-Sandbox-Port": "8001"}) as http:
        closed = http.get("/")
    with boxes.http(**{"E2b-Sandbox-Id": "abc"}) as http:
        gone = http.get("/")
        page = http.get("/", headers={"User-Agent": "Mozilla/5.0", "Accept": "text/html"})
        of_script = http.get("/", headers={"User-Agent": "Mozilla/5.0", "Sec-Fetch-Mode": "cors"})
        preflight = http.options("/", headers={"Access-Control-Request-Method": "PUT"})
    assert closed.status_code == gone.status_code == page.status_code == 502
    assert closed.json() == {"sandboxId": boxes.public["sandboxID"], "message": CLOSED, "port": 8001, "code": 502}
    assert gone.json() == of_script.json() == {"sandboxId": "abc", "message": GONE, "code": 502}
    assert closed.headers["should-retry"] == "false"
    assert page.headers["content-type"].startswith("text/html")
    assert GONE in page.text
    assert preflight.status_code == 204
    assert {answer.headers["access-control-allow-origin"] for answer in (closed, gone, page, preflight)} == {"*"}


def test_private_ports_need_the_traffic_token(boxes: Sandboxes) -> None:
    """All of them but envd's; without, with a wrong one, and with another sandbox's it is 403."""
    token = boxes.private["trafficAccessToken"]
    assert token
    assert boxes.public["trafficAccessToken"] is None
    with boxes.http(**{"E2b-Sandbox-Id": boxes.private["sandboxID"]}) as http:
        missing, wrong, code = (
            http.get("/"), http.get("/", headers={"E2b-Traffic-Access-Token": "é".encode()}),
            http.get("/health", headers={"E2b-Sandbox-Port": "49999"}),
        )  # fmt: skip
        right = [
            http.get("/health", headers={"E2B-Traffic-Access-Token": token, "E2b-Sandbox-Port": port}).status_code
            for port in ("8000", "49999")
        ]
        envd = http.get("/health", headers={"E2b-Sandbox-Port": "49983"})
    for refused, said in ((missing, "is missing"), (wrong, "is invalid"), (code, "is missing")):
        assert refused.status_code == refused.json()["code"] == 403
        assert refused.json()["message"].startswith("Sandbox is secured with traffic access token.")
        assert said in refused.json()["message"]
    assert right == [200, 200]
    assert envd.status_code == 204


def test_a_mask_is_the_host_that_the_server_sees(boxes: Sandboxes) -> None:
    """With the port in it; the host of the request is X-Forwarded-Host."""
    masked = boxes.create(maskRequestHost="localhost:${PORT}")
    with boxes.http(**{"E2b-Sandbox-Id": masked["sandboxID"], "Host": "sandbox.e2b.test"}) as http:
        lines = http.get("/").text.splitlines()
        update = {"allowPublicTraffic": True, "maskRequestHost": "other"}
        refused = httpx.put(
            f"{boxes.served.url}/sandboxes/{masked['sandboxID']}/network", headers=boxes.key, json=update, timeout=60
        )
    assert "Host: localhost:8000" in lines
    assert "X-Forwarded-Host: sandbox.e2b.test" in lines
    assert refused.status_code == 400
    assert "maskRequestHost" in refused.json()["message"]


def test_a_server_inside_may_speak_https(boxes: Sandboxes, tmp_path: Path) -> None:
    """At the ports of `httpsPorts`, with any certificate; at others it is plain HTTP."""
    tmp_path.chmod(0o700)
    with open(keep_certificate(str(tmp_path), "localhost")[0]) as file:
        made = boxes.create(file.read(), httpsPorts=[8443])
    with boxes.http(**{"E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "8443"}) as http:
        assert http.post("/sum", content=b"a" * 3_000_000).text == "3000000"
        assert http.get(f"/raw?{quote(OK)}%0D%0Aok").text == "ok"
        assert http.get("/", headers={"E2b-Sandbox-Port": "8000"}).status_code == 200


def test_web_sockets_are_between_client_and_server(boxes: Sandboxes) -> None:
    """Subprotocol, text, binary and large messages, pings, close codes; a refusal of the server is its own."""

    async def talk() -> None:
        url = boxes.served.url.replace("http", "ws", 1)
        names = boxes.headers()
        async with websockets.connect(
            f"{url}/ws", additional_headers=names, subprotocols=[websockets.Subprotocol("one")], max_size=1 << 25
        ) as talking:
            assert talking.subprotocol == "one"
            for message in ("text é", b"\0\1", b"a" * 3_000_000):
                await talking.send(message)
                assert await talking.recv() == message
            await (await talking.ping(b"p"))
            await talking.close(4001, "bye")
            assert (talking.close_code, talking.close_reason) == (4001, "bye")
        for path, port, status, said in (("/other", 8000, 200, "GET /other"), ("/", 8001, 502, CLOSED)):
            with pytest.raises(websockets.InvalidStatus) as refused:
                await websockets.connect(url + path, additional_headers=boxes.headers(port))
            assert refused.value.response.status_code == status
            assert said in bytes(refused.value.response.body or b"").decode()

    asyncio.run(talk())


EVENTS = f"/hang?{quote(OK)}Content-Type:%20text/event-stream%0D%0A%0D%0Adata:%201"
# Ends once no connection of port 8000 (1F40) is established.
WAITS = """
import time
while any(row.split()[1].endswith(":1F40") and row.split()[3] == "01" for row in list(open("/proc/net/tcp"))[1:]):
    time.sleep(0.02)
print("none")
"""


def test_streams_end_with_the_client_and_with_the_sandbox(boxes: Sandboxes) -> None:
    """Events come one by one; the server's connection ends with the client's, and all streams with the sandbox."""
    sandbox_id = boxes.create()["sandboxID"]
    with boxes.http(**{"E2b-Sandbox-Id": sandbox_id}) as http:
        with http.stream("GET", EVENTS) as stream:
            assert next(stream.iter_text()) == "data: 1"
        with boxes.served.service.client() as api:
            ended = api.post(f"/api/sandboxes/sb_{sandbox_id}/exec", json={"argv": ["python3", "-c", WAITS]})
        assert ended.json()["stdout"] == "none\n"
        with http.stream("GET", EVENTS) as stream:
            pieces = stream.iter_text()
            assert next(pieces) == "data: 1"
            httpx.delete(f"{boxes.served.url}/sandboxes/{sandbox_id}", headers=boxes.key, timeout=60).raise_for_status()
            with pytest.raises(httpx.ReadError):
                next(pieces)
