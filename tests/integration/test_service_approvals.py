"""Approvals and the audit log over HTTP: who waits, who may decide, what is told to whom, what the log says of it."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloche import ApprovalDenied
from cloche.agent.approval import ApprovalRequest, Decided, Gate, Risk
from cloche.agent.queue import ApprovalQueue
from cloche.audit.verify import verify
from cloche.records.database import Database
from cloche.records.keys import create_key
from cloche.server.identities import csrf_token, use_link_code
from tests.harness.service import Service, serving

CALL = {"tool": "run_code", "risk": "high", "arguments": {"code": "print(1)"}, "rules": {"runs_on": "local"}}
CRITICAL = {"tool": "os.execute", "risk": "critical", "arguments": {"command": "id"}}
PATH = "/api/approvals"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve, with the audit on."""
    home = tmp_path_factory.mktemp("service")
    with serving(home, CLOCHE_AUDIT=str(home / "audit")) as found:
        yield found


@pytest.fixture(scope="module")
def agent(service: Service) -> Iterator[httpx.Client]:
    """Return a client with scope run alone."""
    with service.client(service.new_key("run")) as client:
        yield client


@pytest.fixture(scope="module")
def human(service: Service) -> Iterator[httpx.Client]:
    """Return a client that may read and approve."""
    with service.client(service.new_key("read", "approve")) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Return threads for clients that wait."""
    with ThreadPoolExecutor(4) as found:
        yield found


def asked(agent: httpx.Client, **call: Any) -> int:
    """Ask for a call and return the request's id."""
    answer = agent.post(PATH, json={**CALL, **call})
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"{PATH}/{answer.json()['id']}"
    return int(answer.json()["id"])


def waits(pool: ThreadPoolExecutor, client: httpx.Client, number: int) -> Future[dict[str, Any]]:
    """Let a client wait for a decision."""
    return pool.submit(lambda: client.get(f"{PATH}/{number}", params={"wait": 30}).json())


def statuses(client: httpx.Client, number: int, *verbs: str, **word: Any) -> list[int]:
    """Return the status of each verb that is tried on a request."""
    return [client.post(f"{PATH}/{number}/{verb}", json=word or None).status_code for verb in verbs]


def test_an_agent_waits_until_a_human_approves(
    agent: httpx.Client, human: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    """The human is told of the call, its rules and what changed; the agent of who said yes; the log of both."""
    coming = pool.submit(lambda: human.get(PATH, params={"wait": 30}).json())
    before = asked(agent, arguments={"code": "print(0)"})
    assert [one["id"] for one in coming.result()["items"]] == [before]
    assert human.post(f"{PATH}/{before}/deny", json={"reason": "no"}).json()["status"] == "denied"
    number = asked(agent)
    deciding = waits(pool, agent, number)
    shown = human.get(f"{PATH}/{number}").json()
    assert (shown["arguments"], shown["rules"], shown["risk"]) == (CALL["arguments"], CALL["rules"], "high")
    assert "-code: print(0)\n+code: print(1)" in shown["changes"]
    assert not deciding.done()
    assert statuses(human, number, "approve", reason="reviewed", remember=True) == [200]
    decision = deciding.result()["decision"]
    assert (decision["isApproved"], decision["isRemembered"], decision["reason"]) == (True, True, "reviewed")
    assert (decision["by"][:4], decision["from"]) == ("key_", "127.0.0.1")
    assert statuses(human, number, "approve", "deny", "confirm") == [409] * 3
    (event,) = human.get("/api/audit", params={"kind": "approval", "text": "REVIEWED"}).json()["items"]
    assert (event["approval"], event["address"], event["by"]) == (number, "127.0.0.1", decision["by"])
    assert event["asked_by"] == shown["askedBy"]


def test_a_critical_call_is_approved_and_then_confirmed(
    agent: httpx.Client, human: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    """One yes, however often, lets nothing through; a confirmation comes second; a no ends it in between."""
    number, other = asked(agent, **CRITICAL), asked(agent, **CRITICAL)
    deciding = waits(pool, agent, number)
    assert statuses(human, number, "confirm", "approve", "approve") == [409, 200, 409]
    shown = human.get(f"{PATH}/{number}").json()
    assert (shown["status"], shown["isConfirmation"], shown["decision"]) == ("waiting", True, None)
    assert not deciding.done()
    assert statuses(human, number, "confirm") == [200]
    assert deciding.result()["status"] == "approved"
    assert statuses(human, other, "approve", "deny") == [200, 200]
    assert agent.get(f"{PATH}/{other}").json()["status"] == "denied"
    another = asked(agent, **CRITICAL)
    assert statuses(human, another, "approve", remember=True) == [422]
    assert statuses(human, another, "deny") == [200]


def test_a_second_person_confirms_where_the_operator_wants_two(tmp_path: Path) -> None:
    """Who has approved a critical call is refused, and another key is not; a no is anybody's."""
    with serving(tmp_path, CLOCHE_APPROVALS_TWO_PEOPLE="true") as service:
        one, other = (service.client(service.new_key("approve", "read")) for _ in range(2))
        agent = service.client(service.new_key("run", "read"))
        number = asked(agent, **CRITICAL)
        assert statuses(one, number, "approve", "confirm") == [200, 403]
        assert statuses(other, number, "confirm") == [200]
        number = asked(agent, **CRITICAL)
        assert statuses(one, number, "approve", "deny") == [200, 200]
        for client in (one, other, agent):
            client.close()


def test_a_gate_on_this_machine_asks_the_same_humans(service: Service, human: httpx.Client) -> None:
    """A process that holds the database's queue is approved, and confirmed in a row of its own, over HTTP."""
    decided: list[Any] = []
    gate = Gate(
        ApprovalQueue(service.database, patience_s=60), patience_s=60,
        on_event=lambda event: decided.append(event.decision) if isinstance(event, Decided) else None,
    )  # fmt: skip
    request = ApprovalRequest(tool="os.execute", risk=Risk.CRITICAL, arguments={"command": "id"})
    thread = threading.Thread(target=lambda: asyncio.run(gate.approve(request)))
    thread.start()
    for verb, wrong in (("approve", "confirm"), ("confirm", "approve")):
        (waiting,) = human.get(PATH, params={"wait": 30}).json()["items"]
        assert (waiting["isConfirmation"], waiting["askedBy"]) == (verb == "confirm", None)
        assert statuses(human, waiting["id"], wrong, verb) == [409, 200]
    thread.join(60)
    assert [one.is_approved for one in decided] == [True, True]


def test_nobody_decides_what_the_same_key_asked_for(service: Service, human: httpx.Client) -> None:
    """Not even with all scopes; another key may, and so may the human who came by the printed link."""
    with service.client() as first:
        mine, other = asked(first), asked(first, **CRITICAL)
        assert statuses(first, mine, "approve", "confirm", "deny") == [403] * 3
        assert first.post(f"{PATH}/{mine}/approve").json()["type"].endswith("/own-request")
        assert statuses(human, mine, "approve") == [200]
    database = Database(service.database)
    cookie = use_link_code(database, service.link.partition("code=")[2])
    database.close()
    assert cookie is not None
    token = csrf_token(hashlib.sha256(cookie.encode()).digest())
    with service.client("", cookies={"cloche_session": cookie}) as browser:
        assert statuses(browser, other, "approve") == [403]  # no token of the page: another site's request
        browser.headers["X-CSRF-Token"] = token
        assert statuses(browser, other, "approve", "confirm") == [200, 200]
        assert browser.get(f"{PATH}/{other}").json()["decision"]["by"] == "browser"


def test_what_nobody_answers_is_a_no(agent: httpx.Client, human: httpx.Client) -> None:
    """Whoever waits is told at the deadline; a word that comes later is refused."""
    number = asked(agent, patienceSeconds=0.5)
    begun = time.monotonic()
    assert agent.get(f"{PATH}/{number}", params={"wait": 30}).json()["status"] == "expired"
    assert time.monotonic() - begun < 20
    assert statuses(human, number, "approve", "deny") == [409, 409]
    critical = asked(agent, **CRITICAL, patienceSeconds=1)
    assert statuses(human, critical, "approve") == [200]
    assert agent.get(f"{PATH}/{critical}", params={"wait": 30}).json()["status"] == "expired"
    assert statuses(human, critical, "confirm") == [409]
    listed = human.get(PATH, params={"status": "expired", "limit": 1}).json()
    assert [one["id"] for one in listed["items"]] == [critical]
    following = human.get(PATH, params={"status": "expired", "limit": 1, "cursor": listed["nextCursor"]}).json()
    assert [one["id"] for one in following["items"]] == [number]


def events_of(
    client: httpx.Client,
    count: int,
    after: str | None = None,
    *,
    name: str = "",
    begun: threading.Event | None = None,
) -> list[tuple[str, str, dict[str, Any]]]:
    """Return server-sent events, up to so many (of that name): number, name and data; `begun` is set by the first."""
    wanted, found = name, list[tuple[str, str, dict[str, Any]]]()
    headers = {"Last-Event-ID": after} if after is not None else {}
    with client.stream("GET", f"{PATH}/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if line:
                fields[name] = value
            elif "event" in fields:
                found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
                fields = {}
                if begun is not None:
                    begun.set()
            if sum(wanted in ("", one) for _, one, _ in found) == count:
                return found
    return found


def test_events_tell_what_happens_and_go_on_where_they_ended(
    service: Service, agent: httpx.Client, human: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    """What waits, what comes, what ends; after a number, all that changed since. A call's arguments are not in them."""
    first = asked(agent, arguments={"code": "print(1)" + " " * 300 + "# beyond"})
    with service.client(service.new_key("approve")) as reader:
        begun = threading.Event()
        following = pool.submit(events_of, reader, 2, name="decided", begun=begun)
        assert begun.wait(60)
        critical = asked(agent, **CRITICAL)
        statuses(human, critical, "approve", "confirm")
        statuses(human, first, "deny")
        found = following.result(60)
        latest = {one[2]["id"]: (one[1], one[2]["status"]) for one in events_of(reader, 2, after=found[0][0])}
    assert (found[0][1], found[0][2]["id"]) == ("asked", first)
    assert latest == {critical: ("decided", "approved"), first: ("decided", "denied")}
    assert "beyond" not in json.dumps(found)
    numbers = [int(number) for number, _, _ in found]
    assert numbers == sorted(set(numbers))
    short = asked(agent, patienceSeconds=0.5)
    told = events_of(human, 2)
    assert [(name, data["id"]) for _, name, data in told] == [("asked", short), ("expired", short)]


def test_what_is_anothers_is_not_there(service: Service, agent: httpx.Client, human: httpx.Client) -> None:
    """Another project's key finds nothing of this one; a key that only runs finds what it asked for itself."""
    number = asked(agent)
    database = Database(service.database)
    foreign = create_key(database, name="foreign", scopes=["run", "read", "approve", "admin"], project="other")[1]
    database.close()
    with service.client(foreign) as stranger, service.client(service.new_key("run")) as runner:
        assert stranger.get(f"{PATH}/{number}").status_code == 404
        assert statuses(stranger, number, "approve", "deny", "confirm") == [404] * 3
        assert stranger.get(PATH).json()["items"] == []
        assert stranger.get("/api/audit").status_code == 403
        assert runner.get(f"{PATH}/{number}").status_code == 404
        assert (runner.get(PATH).status_code, runner.get(f"{PATH}/events").status_code) == (403, 403)
        assert statuses(runner, asked(runner, patienceSeconds=1), "approve") == [403]
        assert human.post(PATH, json=CALL).status_code == 403
    for forged, status in (("99999", 404), ("0", 422), ("x", 422), (str(1 << 63), 422)):
        assert human.get(f"{PATH}/{forged}").status_code == status
    assert agent.get(f"{PATH}/{number}").json()["status"] == "waiting"
    statuses(human, number, "deny")


def test_the_audit_log_is_asked_exported_and_verified(service: Service, human: httpx.Client, tmp_path: Path) -> None:
    """By page and filter; as JSON Lines that verify, as CSV without formulas; and a changed byte shows."""
    with service.client() as first:
        numbers = [asked_by_other(service) for _ in range(3)]
        for number in numbers:
            assert statuses(first, number, "deny", reason=f"=cmd() {number}") == [200]
        page = first.get("/api/audit", params={"limit": 2, "kind": "denial", "text": "=cmd()"}).json()
        older = first.get(
            "/api/audit", params={"limit": 2, "kind": "denial", "text": "=cmd()", "cursor": page["nextCursor"]}
        ).json()
        found = [one["approval"] for one in [*page["items"], *older["items"]]]
        assert (found, older["nextCursor"], older["isPartial"]) == (numbers[::-1], None, False)
        assert first.get("/api/audit", params={"since": "1h", "until": "2000-01-01"}).json()["items"] == []
        assert first.get("/api/audit", params={"since": "whenever"}).status_code == 422
        export = first.get("/api/audit/export")
        (tmp_path / "export.jsonl").write_bytes(export.content)
        report = verify("", file=str(tmp_path / "export.jsonl"))
        checked = first.post("/api/audit/verify").json()
        assert (report.is_good, checked["isWhole"], checked["events"]) == (True, True, report.events)
        assert first.post("/api/audit/verify", json={"heads": [str(report.last)]}).json()["isWhole"]
        assert not first.post("/api/audit/verify", json={"heads": ["a" * 64]}).json()["isWhole"]
        table = first.get("/api/audit/export", params={"format": "csv", "text": "=cmd()"}).text
        assert [row["reason"][:6] for row in csv.DictReader(io.StringIO(table))] == ["'=cmd("] * 3
        assert human.get("/api/audit/export").status_code == 403
        assert human.post("/api/audit/verify").status_code == 403
        log = Path(service.environ["CLOCHE_AUDIT"], "audit.jsonl")
        log.write_bytes(log.read_bytes().replace(b"=cmd() ", b"=cmd()_", 1))
        assert first.post("/api/audit/verify").json()["faultCount"] == 1


def asked_by_other(service: Service) -> int:
    """Ask with a key of its own."""
    with service.client(service.new_key("run")) as client:
        return asked(client)


def test_nobody_says_where_they_come_from(agent: httpx.Client, human: httpx.Client) -> None:
    """The address of a decision is that of the connection, whatever headers for proxies say."""
    number = asked(agent)
    headers = {"X-Forwarded-For": "203.0.113.9", "Forwarded": "for=203.0.113.9", "X-Real-IP": "203.0.113.9"}
    decision = human.post(f"{PATH}/{number}/deny", headers=headers).json()["decision"]
    assert decision["from"] == "127.0.0.1"


def test_a_gate_is_told_of_a_no(service: Service, human: httpx.Client) -> None:
    """With the reason."""
    gate = Gate(ApprovalQueue(service.database, patience_s=60), patience_s=60)
    request = ApprovalRequest(tool="only_here", risk=Risk.HIGH, arguments={"code": "1"})
    with ThreadPoolExecutor(1) as one:
        asking = one.submit(lambda: asyncio.run(gate.approve(request)))
        found: list[int] = []
        while not found:
            items = human.get(PATH, params={"wait": 30}).json()["items"]
            found = [item["id"] for item in items if item["tool"] == "only_here"]
        statuses(human, found[0], "deny", reason="not that")
        with pytest.raises(ApprovalDenied, match="not that"):
            asking.result(60)


def test_a_request_is_bounded(service: Service, human: httpx.Client) -> None:
    """In bytes, in what it is made of, and in how many of one key wait at once."""
    with service.client(service.new_key("run")) as greedy:
        for body, status in (
            (json.dumps({**CALL, "arguments": {"code": "x" * 300_000}}), 413),
            (json.dumps({**CALL, "arguments": {"x": float("nan")}}), 422),
            (json.dumps({**CALL, "arguments": {"x": "DIGITS"}}).replace('"DIGITS"', "9" * 5_000), 422),
            (json.dumps({**CALL, "arguments": {"x": "DEEP"}}).replace('"DEEP"', "[" * 9_000 + "]" * 9_000), 422),
            (json.dumps({**CALL, "risk": "none"}), 422),
            (json.dumps({**CALL, "askedBy": "key_1"}), 422),
            ("{", 422),
        ):
            assert greedy.post(PATH, content=body).status_code == status, body[:80]
        numbers = [asked(greedy) for _ in range(64)]
        assert greedy.post(PATH, json=CALL).status_code == 429
        assert statuses(human, numbers[0], "deny") == [200]
        asked(greedy)
