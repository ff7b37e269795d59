"""The page of the service, in Debian's Chromium: what a human does there, and what a guest cannot do there."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, StorageState, WebSocketRoute, expect

from cloche.agent.approval import ApprovalRequest, Decided, Decision, Gate, Risk
from cloche.agent.queue import ApprovalQueue
from cloche.agent.toolbox import Toolbox
from cloche.backends.toolchain import languages_here
from cloche.core.errors import ApprovalDenied
from cloche.core.policy import DEFAULT_LANGUAGES, Policy
from cloche.records import runs as run_records
from cloche.records.database import Database
from cloche.records.ids import new_id
from tests.harness.browser import HOSTILE_HTML, HOSTILE_TEXT, ONLY_IN_THE_PAGE, WAIT_MS, chromium, opened, trap
from tests.harness.service import Service, serving

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "src" / "cloche" / "server" / "static" / "vendor"
PICTURES = ROOT / "docs" / "pictures"
PICTURE_NAMES = ("service-run.png", "service-approvals.png", "service-compare.png")
MOST_PICTURE_BYTES = 150_000
expect.set_options(timeout=WAIT_MS)
PARTS = ("run", "activity", "approvals", "sandboxes", "snapshots", "hosts", "settings")
WITH_COLOURS = ("/runs/run_", "/approvals", "/hosts", "/compare?")
COUNTED = re.compile(r"^\(\d+\) ")
PLOT = """\
import sys
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
import pandas as pd

months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun"]
frame = pd.DataFrame({"month": months, "orders": [120, 135, 160, 158, 190, 214]})
frame["change"] = frame["orders"].diff()
print(len(frame), "\\x1b[32mrows\\x1b[0m")
print("the first month has no change", file=sys.stderr)
plt.figure(figsize=(7, 2.6))
plt.bar(frame["month"], frame["orders"], color="#0f766e")
plt.title("Orders")
plt.tight_layout()
plt.show()
frame
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Be the home of the service's user, with a workspace."""
    found = tmp_path_factory.mktemp("home")
    (found / "shop").mkdir()
    (found / "shop" / "requirements.txt").write_text("httpx==0.27.0\nrich==13.9.3\n")
    (found / "shop" / "orders.py").write_text("print(1)\n")
    return found


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[Service]:
    """Serve, for all tests of this file."""
    with serving(home, "--workspace-root", f"{home / 'shop'}:rw") as found:
        yield found


@pytest.fixture(scope="module")
def box(service: Service) -> str:
    """Open a live sandbox, with a file and a server in it, and return its id."""
    asked = {"name": "build", "labels": {"task": "7"}, "files": [{"path": "in/a.txt", "text": "<b>one</b>\n"}]}
    server = {"argv": ["python3", "-u", "-m", "http.server", "8000"]}
    with service.client() as client:
        made = client.post("/api/sandboxes", json=asked).raise_for_status().json()["id"]
        client.post(f"/api/sandboxes/{made}/processes", json=server).raise_for_status()
    return str(made)


@pytest.fixture(scope="module")
def queue(service: Service) -> ApprovalQueue:
    """Be the queue that the service shows, as an agent on this machine has it."""
    return ApprovalQueue(service.database, patience_s=120)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Hold one browser, for all tests of this file."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def cookies(service: Service, browser: Browser) -> StorageState:
    """Log in by the printed link, as a human does; it has been looked at before, as messengers do."""
    with service.client("") as client:
        assert client.get(service.link).status_code == 200
    with opened(browser, None) as seen:
        seen.page.goto(service.link)
        seen.page.get_by_role("button", name="Open the service").click()
        seen.page.wait_for_url("**/run")
        return seen.context.storage_state()


@pytest.fixture
def page(service: Service, browser: Browser, cookies: StorageState) -> Iterator[Page]:
    """Open a page that is logged in; nothing may go wrong in it."""
    with opened(browser, cookies, base_url=service.address) as seen:
        yield seen.page
        assert not seen.errors
        assert not seen.dialogs


@contextmanager
def asking(queue: ApprovalQueue, *requests: ApprovalRequest) -> Iterator[list[str]]:
    """Ask for calls as an agent's gate does, in a thread, and give what came of each."""
    came: list[str] = []

    def ask() -> None:
        gate = Gate(queue, patience_s=120)
        for request in requests:
            try:
                decision = asyncio.run(gate.approve(request))
                came.append(f"approved by {decision.by}" if decision else "not asked")
            except ApprovalDenied as error:
                came.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield came
    except BaseException:
        for entry in queue.waiting():
            queue.decide(entry.number, Decision(is_approved=False, by="the end of a test"))
        raise
    finally:
        thread.join(120)


def picture(page: Page, name: str) -> None:
    """Take a picture for the documents, where that is asked for."""
    if os.environ.get("PICTURES") == "1":
        from PIL import Image

        PICTURES.mkdir(exist_ok=True)
        page.evaluate("document.activeElement?.blur()")
        page.set_viewport_size({"width": 1280, "height": 400})  # no less than its content is as high as the page then
        height = int(page.evaluate("document.documentElement.scrollHeight"))
        page.set_viewport_size({"width": 1280, "height": height})
        for frame in page.locator("iframe").all():  # each is drawn by a process of its own, and only where it is seen
            expect(frame.content_frame.locator("body")).to_be_visible()
            shot = Image.open(io.BytesIO(frame.screenshot()))
            assert len(shot.convert("L").getcolors() or ()) > 2, "the frame is empty"
        page.screenshot(path=PICTURES / name)
        with Image.open(PICTURES / name) as found:  # 256 colours are enough, and take a third
            smaller = found.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        smaller.save(PICTURES / name, optimize=True)


def put_run(service: Service, **document: Any) -> str:
    """Write down a run that has ended, as a worker does."""
    database, number = Database(str(service.database)), new_id("run")
    try:
        begun = run_records.begin(
            id=number, project="default", worker="1-none", session_id=document.get("sessionId"),
            api_key=None, idempotency_key=None, request_sha256=None, summary={},
        )  # fmt: skip
        with database.writing() as session:
            (begun + run_records.finish(id=number, status="ok", document={"id": number, **document}))(session)
    finally:
        database.close()
    return number


def test_the_printed_link_works_once_and_gives_a_cookie_that_forms_prove(
    service: Service, cookies: StorageState
) -> None:
    """A link is used up by its button alone; no page is shown without its cookie, and no form works without a token."""
    (cookie,) = cookies["cookies"]
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
    with service.client("") as client:
        again = client.post("/login", data={"code": service.link.partition("code=")[2]})
        assert (again.status_code, "set-cookie" in again.headers) == (403, False)
        for part in PARTS:
            found = client.get(f"/{part}")
            assert found.status_code == 401
            assert "cloche serve" in found.text
        with service.client() as by_key:
            assert by_key.get("/run").status_code == 401  # the page is for browsers
        policy = client.get("/login").headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert client.get("/static/../service.py").status_code == 404
        assert client.get("/static/%2e%2e/service.py").status_code == 404
    forms = {
        "/run": {"code": "1"},
        "/settings/keys": {"name": "x", "scope": "admin"},
        "/approvals/1": {},
        "/logout": {},
    }
    with service.client("", cookies={cookie["name"]: cookie["value"]}) as browser:
        for path, data in forms.items():
            assert browser.post(path, data=data).status_code == 403
            assert browser.post(path, data={**data, "csrfToken": "0" * 64}).status_code == 403
        assert browser.get("/settings").status_code == 200


def test_code_is_run_and_its_plot_table_and_enforcement_are_seen(page: Page) -> None:
    """What is typed runs at Ctrl and Enter; a figure, a table in a frame and each control's state follow."""
    page.goto("/run")
    page.get_by_label("Code").fill(PLOT)
    page.keyboard.press("Control+Enter")
    result = page.locator("#result")
    expect(result.locator("[data-status=ok]")).to_be_visible()
    image = result.get_by_role("img", name="Figure 1")
    assert image.evaluate("one => one.complete && one.naturalWidth") > 300
    expect(page.frame_locator("#result iframe").get_by_text("Jun")).to_be_visible()
    expect(result.locator(".t-green")).to_have_text("rows")
    expect(result.get_by_label("Standard error")).to_contain_text("no change")
    expect(result.locator(".control")).to_have_count(10)
    expect(result.locator(".control.enforced", has_text="network")).to_contain_text("network namespace")
    picture(page, PICTURE_NAMES[0])
    result.locator(".run-id").click()
    expect(page.locator(".chain > li")).to_have_count(2)
    expect(page.locator(".note.good")).to_contain_text("no fault")


def test_code_is_there_again_and_a_run_can_be_run_again(page: Page) -> None:
    """What was typed is there when one comes back; a run's page has its code, and leads to the form filled in so."""
    page.goto("/run")
    offered = page.get_by_label("Language").locator("option").all_inner_texts()
    assert offered == [name for name in DEFAULT_LANGUAGES if name in languages_here()]
    code = page.get_by_label("Code")
    expect(code).to_have_accessible_description(re.compile("Escape, then Tab, leaves"))
    code.fill("if True:\n")
    code.press("End")
    page.keyboard.press("Tab")
    page.keyboard.type("print('<kept>')")
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Time-out")).to_be_focused()
    page.keyboard.type("20s")
    page.get_by_role("link", name="Activity").click()
    page.get_by_role("link", name="Run", exact=True).click()
    expect(code).to_have_value("if True:\n    print('<kept>')")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#result [data-status=ok]")).to_be_visible()
    page.locator("#result .run-id").click()
    expect(page.get_by_role("region", name="Code")).to_have_text("if True:\n    print('<kept>')")
    page.goto("/run")
    code.fill("another")
    page.go_back()
    page.get_by_role("link", name="Run again").click()
    expect(code).to_have_value("if True:\n    print('<kept>')")
    expect(page.get_by_label("Time-out")).to_have_value("20s")
    code.fill("changed")
    page.reload()
    expect(code).to_have_value("changed")


def test_a_page_that_fails_says_what_and_leads_back(page: Page, service: Service, cookies: StorageState) -> None:
    """Whatever fails is a page with the reason and a way on, also where no route is, and what is too large."""
    page.goto("/no/such/page")
    expect(page.get_by_role("alert")).to_contain_text("no page at this address")
    page.get_by_role("link", name="Go to Run").click()
    expect(page).to_have_url(f"{service.address}/run")
    page.goto("/runs/none")
    page.get_by_role("link", name="Go to Activity").click()
    expect(page).to_have_url(f"{service.address}/activity")
    page.goto("/snapshots?session=a")
    page.get_by_label("Workspace", exact=True).fill("/etc")
    page.get_by_role("button", name="Take a snapshot").click()
    expect(page.get_by_role("alert")).to_contain_text("/etc is not below a folder")
    page.get_by_role("link", name="Go to Snapshots").click()
    expect(page).to_have_url(f"{service.address}/snapshots")
    (cookie,) = cookies["cookies"]
    with service.client("", cookies={cookie["name"]: cookie["value"]}) as client:
        large = client.post("/settings/keys", data={"name": "x" * (9 << 20)}, headers={"Accept": "text/html"})
        assert (large.status_code, large.headers["content-type"][:9]) == (413, "text/html")
        assert "Go to Settings" in large.text
        for elsewhere in ("https://evil.example/snapshots/x", f"{service.address}//evil.example/x"):
            assert "evil" not in client.get("/runs/none", headers={"Referer": elsewhere}).text
    page.goto("/run")
    page.get_by_label("Code").fill("1")
    page.get_by_label("Files").evaluate(
        "one => { const all = new DataTransfer(); all.items.add(new File([new Uint8Array(33 << 20)], 'a'));"
        " one.files = all.files; }"
    )
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#result [role=alert]")).to_contain_text("Body too large")


def test_what_waits_is_counted_on_every_page_and_decisions_show_by_themselves(page: Page, queue: ApprovalQueue) -> None:
    """A request is counted in menu and title of a page that is open already; a decision is listed without a reload."""
    page.goto("/run")
    expect(page).to_have_title("Run · Cloche")
    other = page.context.new_page()
    other.goto("/approvals")
    request = ApprovalRequest(tool="counted", risk=Risk.HIGH, arguments={})
    with asking(queue, request):
        expect(page).to_have_title("(1) Run · Cloche")
        expect(page.get_by_role("link", name="Approvals 1 waiting")).to_be_visible()
        expect(page.get_by_text("A request waits for a decision.")).to_be_attached()
        page.goto("/hosts")
        expect(page).to_have_title("(1) Hosts · Cloche")
        queue.decide(queue.waiting()[0].number, Decision(is_approved=False, by="somebody else", reason="no"))
    expect(page).to_have_title("Hosts · Cloche")
    expect(other.locator("#decided tr", has_text="counted")).to_contain_text("denied")


@pytest.mark.soak
def test_output_is_seen_while_code_runs_which_can_be_cancelled(page: Page) -> None:
    """Output comes before the end, as text; cancelling kills the run, and activity has both."""
    page.goto("/run")
    page.get_by_label("Code").fill("import time\nprint('<b>be\\x1b[31mgun</b>', flush=True)\ntime.sleep(60)")
    page.get_by_label("Session").fill("agent-7")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_label("Output so far")).to_have_text("<b>begun</b>\n")
    with page.context.expect_page() as other:
        page.locator(".run-id").click(modifiers=["Control"])
    other.value.goto("/activity?session=agent-7")
    expect(other.value.locator("#now .badge.busy")).to_have_text("running")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#result [data-status=cancelled]")).to_be_visible()
    expect(other.value.locator("#now")).to_contain_text("Nothing runs")
    other.value.reload()
    expect(other.value.locator(".rows tbody tr")).to_have_count(1)


@pytest.mark.soak
def test_without_scripts_code_runs_and_all_can_be_read(
    service: Service, browser: Browser, cookies: StorageState
) -> None:
    """A plain form with a file runs code, and its result is on the next page; each part can be read."""
    with opened(browser, cookies, base_url=service.address, java_script_enabled=False) as seen:
        page = seen.page
        page.goto("/run")
        page.get_by_label("Code").fill("print(open('in.txt').read() * 2)")
        page.get_by_label("Files").set_input_files({"name": "in.txt", "mimeType": "text/plain", "buffer": b"twice "})
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_label("Output", exact=True)).to_have_text("twice twice \n")
        assert "/runs/run_" in page.url
        for part in PARTS:
            page.goto(f"/{part}")
            expect(page.get_by_role("heading", level=1)).to_be_attached()
        page.goto("/run")
        page.get_by_label("Time-out").fill("soon")
        page.get_by_label("Code").fill("1")
        page.get_by_role("button", name="Run").click()
        expect(page.locator(".note.bad")).to_contain_text("timeout")


def test_a_human_approves_a_high_call_by_a_key_while_an_agent_waits(page: Page, queue: ApprovalQueue) -> None:
    """An agent's code runs when its request was chosen with j and approved with a, and not before."""
    answers: list[str] = []

    def be_agent() -> None:
        with Toolbox(tier=3, approve=queue, patience_s=120) as toolbox:
            answers.append(toolbox.call_and_wait("run_code", {"code": "print(6 * 7)"}).text)

    page.goto("/approvals")
    agent = threading.Thread(target=be_agent)
    agent.start()
    try:
        request = page.locator("[data-request]")
        expect(request).to_contain_text("print(6 * 7)")
        expect(request.locator(".badge")).to_have_text("high")
        assert not answers
        page.keyboard.press("j")
        page.keyboard.press("a")
        expect(page.locator("#waiting")).to_contain_text("Nothing waits")
    finally:
        agent.join(120)
    assert "42" in answers[0]


def test_a_host_is_allowed_for_a_folder_on_the_page(page: Page, queue: ApprovalQueue) -> None:
    """A question of a sandbox with a name has the kinds of yes that the terminal has."""
    names = {"sandbox": "claude-shop", "folder": "/home/me/shop"}
    request = ApprovalRequest.of_host("registry.example", 443, policy=Policy(), runs_on="local", **names)
    page.goto("/approvals")
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(lambda: asyncio.run(queue(request)))
        shown = page.locator("[data-request]")
        expect(shown).to_contain_text("registry.example")
        shown.get_by_label("yes, always in this folder").check()
        shown.get_by_role("button", name="Approve").click()
        decision = asking.result(60)
    assert (decision.is_approved, decision.is_for_folder, decision.is_once) == (True, True, False)


def test_a_critical_call_is_not_confirmed_by_the_same_key_once_more(page: Page, queue: ApprovalQueue) -> None:
    """The key `a` leads to Confirm, and confirms only there, two seconds after that has come."""
    critical = ApprovalRequest(tool="os.remove", risk=Risk.CRITICAL, arguments={"command": "rm -r build"})
    decided: list[bool] = []

    def ask() -> None:
        gate = Gate(queue, patience_s=120, on_event=lambda event: decided.append(isinstance(event, Decided)))
        asyncio.run(gate.approve(critical))

    page.clock.install()
    page.goto("/approvals")
    agent = threading.Thread(target=ask)
    agent.start()
    try:
        confirm = page.get_by_role("button", name="Confirm")
        expect(page.locator("[data-request]")).to_contain_text("rm -r build")
        page.keyboard.press("j")
        page.keyboard.press("a")
        expect(confirm).to_be_visible()
        page.keyboard.press("j")
        page.keyboard.press("a")
        expect(confirm).to_be_focused()
        page.clock.fast_forward(2_000)
        page.keyboard.press("a")
        expect(page.locator("#waiting")).to_contain_text("Nothing waits")
    finally:
        agent.join(120)
    assert decided.count(True) == 2


@pytest.mark.soak
def test_a_critical_call_is_asked_for_twice_and_a_denial_says_why(page: Page, queue: ApprovalQueue) -> None:
    """A critical call takes a second yes; a changed call shows its difference, and a no carries its reason."""
    rules = {"runs_on": "local", "policy": {"network": "off"}, "limits": {"timeout_s": 30.0}}
    critical = ApprovalRequest(tool="os.execute", risk=Risk.CRITICAL, arguments={"command": "rm -r build"})
    first = ApprovalRequest(
        tool="deploy", risk=Risk.HIGH, rules=rules,
        arguments={"code": "import shop\n\nshop.publish('orders.csv')\n", "language": "python"},
    )  # fmt: skip
    second = ApprovalRequest(
        tool="deploy", risk=Risk.HIGH, rules={**rules, "policy": {"network": "allowlist", "hosts": ["a.example"]}},
        arguments={"code": "import shop\n\nshop.publish('orders.csv', to='a.example')\n", "language": "python"},
    )  # fmt: skip
    page.goto("/approvals")
    with asking(queue, critical, first, second) as came:
        page.get_by_role("button", name="Approve").click()
        expect(page.locator("[data-request]")).to_contain_text("asked a second time")
        page.get_by_role("button", name="Confirm").click()
        expect(page.locator("[data-request]")).to_contain_text("deploy")
        page.get_by_role("button", name="Approve").click()
        expect(page.locator(".line.added").first).to_contain_text("to='a.example'")
        picture(page, PICTURE_NAMES[1])
        page.get_by_label("Reason").fill("not on a Friday")
        page.get_by_role("button", name="Deny").click()
        expect(page.locator("#waiting")).to_contain_text("Nothing waits")
    assert came[:2] == ["approved by browser"] * 2
    assert "not on a Friday" in came[2]
    page.reload()
    rows = page.locator(".rows tr", has_text="127.0.0.1")
    expect(rows.filter(has_text="os.execute")).to_have_count(2)
    expect(rows.filter(has_text="deploy").filter(has_text="denied")).to_contain_text("not on a Friday")


def test_two_snapshots_are_compared_and_files_restored(page: Page, home: Path) -> None:
    """What changed in a workspace between two snapshots is shown; its files come back, and a script is written."""
    shop = home / "shop"

    def take(kind: str) -> None:
        page.goto("/snapshots")
        page.get_by_label("Of", exact=True).select_option(kind)
        page.get_by_label("keep what the files hold").check()
        page.get_by_role("button", name="Take a snapshot").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("Snapshot")

    take("environment")
    take("workspace")
    (shop / "requirements.txt").write_text("attrs==24.2.0\nrich==13.9.4\n")
    (shop / "orders.py").write_text("print(2)\n")
    take("environment")
    page.get_by_role("button", name="Replicate").click()
    expect(page.get_by_role("status").first).to_contain_text("is written")
    assert (shop / ".cloche-env-replication.sh").stat().st_size > 0
    take("workspace")
    page.goto("/snapshots")
    page.get_by_role("button", name="Compare").first.click()
    expect(page.locator("tr", has_text="rich")).to_contain_text(re.compile(r"13\.9\.3\s*13\.9\.4"))
    expect(page.locator("tr", has_text="attrs").locator("ins")).to_have_text("24.2.0")
    picture(page, PICTURE_NAMES[2])
    page.goto("/snapshots")
    page.get_by_role("button", name="Compare").last.click()
    expect(page.get_by_role("region", name="Files, modified")).to_contain_text("orders.py")
    page.get_by_role("link", name="ws_").first.click()
    page.get_by_label("Workspace", exact=True).press("Enter")  # asks nothing, and restores nothing
    page.get_by_role("button", name="Restore", exact=True).click()
    assert (shop / "orders.py").read_text() == "print(2)\n"
    page.get_by_role("button", name="Restore them").click()
    expect(page.get_by_role("region", name="What was done")).to_contain_text("restored")
    assert (shop / "orders.py").read_text() == "print(1)\n"
    for path in ("/etc", str(home), f"{shop}/../..", "shop"):
        page.goto("/snapshots")
        page.get_by_label("Workspace", exact=True).fill(path)
        page.get_by_role("button", name="Take a snapshot").click()
        expect(page.get_by_role("alert")).to_contain_text("workspacePath")


@pytest.mark.soak
def test_keys_are_made_shown_once_rotated_and_revoked(page: Page, service: Service) -> None:
    """A key that the page made works until the page revokes it; its text is on one page only."""
    page.goto("/settings")
    page.get_by_text("Make a key").click()
    page.get_by_label("Name").fill("for <tests>")
    page.get_by_role("button", name="Make the key").click()
    text = page.locator(".secret").inner_text()
    with service.client(text) as client:
        assert client.get("/api/runs").status_code == 200
        assert client.get("/api/keys").status_code == 403
        page.goto("/settings")
        assert text not in page.content()
        page.get_by_role("button", name="Revoke for <tests>").click()
        page.get_by_role("button", name="Revoke it").click()
        expect(page.locator("tr", has_text="for <tests>")).to_contain_text("revoked")
        assert client.get("/api/runs").status_code == 401


def test_what_nobody_can_undo_asks_first(
    page: Page, service: Service, browser: Browser, cookies: StorageState, home: Path, box: str
) -> None:
    """The focus is on leaving it, by Escape or Return; the act is one Tab further. It needs no script."""
    shop = {"workspacePath": str(home / "shop"), "contents": True}
    with service.client() as client:
        key = client.post("/api/keys", json={"name": "asked"}).raise_for_status().json()["id"]
        kept = client.post("/api/workspace/snapshots", json=shop).raise_for_status().json()["id"]
    acts = (
        ("/settings", "Rotate asked"), ("/settings", "Revoke asked"), (f"/snapshots/{kept}", "Delete this snapshot"),
        (f"/snapshots/{kept}", "Restore"), (f"/sandboxes/{box}", "End the sandbox"),
    )  # fmt: skip
    for path, name in acts:
        page.goto(path)
        opener = page.get_by_role("button", name=name, exact=True)
        question = page.get_by_role("dialog", name=name)
        for word in ("Escape", "Enter"):
            opener.press("Enter")
            expect(question.get_by_role("button", name="Leave it as it is")).to_be_focused()
            assert word == "Enter" or violations(page, "[role=dialog]:popover-open") == []
            page.keyboard.press(word)
            expect(question).to_be_hidden()
            expect(opener).to_be_focused()
    with service.client() as client:
        assert client.get(f"/api/sandboxes/{box}").json()["state"] == "running"
        assert client.get(f"/api/workspace/snapshots/{kept}").status_code == 200
        assert {one["id"]: one["revokedAt"] for one in client.get("/api/keys").json()["items"]}[key] is None
    with opened(browser, cookies, base_url=service.address, java_script_enabled=False) as seen:
        seen.page.goto("/settings")
        seen.page.get_by_role("button", name="Revoke asked").press("Enter")
        seen.page.keyboard.press("Tab")
        with seen.page.expect_navigation():
            seen.page.keyboard.press("Enter")
        expect(seen.page.locator("tr", has_text="asked")).to_contain_text("revoked")


@pytest.mark.soak
def test_debug_namespaces_are_switched(page: Page, service: Service) -> None:
    """What is checked is on, for the service itself, and what is not is off."""
    page.goto("/settings")
    with service.client() as client:
        for is_on in (True, False):
            page.get_by_label("egress").set_checked(is_on)
            with page.expect_navigation():
                page.get_by_role("button", name="Switch").click()
            expect(page.get_by_label("egress")).to_be_checked(checked=is_on)
            assert client.get("/api/sandbox/debug").json()["namespaces"]["egress"] is is_on


def test_a_sandbox_is_opened_looked_into_and_ended(page: Page, service: Service) -> None:
    """Processes, ports and files show by themselves; one is killed, files go in and out, and the end is asked for."""
    page.goto("/run")
    page.keyboard.press("g")
    page.keyboard.press("b")
    page.get_by_label("Name, for you").fill("mine")
    page.get_by_role("button", name="Open a sandbox").click()
    page.wait_for_url("**/sandboxes/sb_*")
    address = page.url
    path = f"/api/sandboxes/{address.rpartition('/')[2]}"
    with service.client() as client:
        line = "mkdir -p in; echo '<b>one</b>' > in/a.txt; echo begun; exec python3 -m http.server 8000"
        client.post(f"{path}/processes", json={"shell": line}).raise_for_status()
    expect(page.locator("#now .checks")).to_contain_text("8000")
    row = page.get_by_role("region", name="Processes").locator("tbody tr")
    expect(row.locator(".badge")).to_have_text("running")
    row.get_by_role("link").click()
    expect(page.get_by_label("Output that nobody has read")).to_contain_text("begun")
    page.goto(f"{address}/files")
    page.get_by_role("link", name="in/").click()
    page.get_by_label("Put files here").set_input_files(
        [{"name": f"{name}.txt", "mimeType": "text/plain", "buffer": name.encode()} for name in ("two", "drei#&ü")]
    )
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("region", name="Files").locator("tbody tr")).to_have_count(3)
    with service.client() as client:
        found = client.get(f"{path}/files/content", params={"path": "/workspace/in/drei#&ü.txt"})
        assert found.content == "drei#&ü".encode()
    page.get_by_role("link", name="a.txt").click()
    expect(page.get_by_role("region", name="Content")).to_have_text("<b>one</b>\n")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert Path(download.value.path()).read_text() == "<b>one</b>\n"
    with service.client() as client:
        client.post(f"{path}/pause").raise_for_status()
    page.goto(f"{address}/terminal")
    expect(page.locator("#state")).to_have_text("No terminal was opened: the sandbox is paused.")
    page.get_by_role("link", name="Back to the sandbox").click()
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Kill").click()
    expect(row.locator(".badge")).to_have_text("signaled")
    expect(page.locator("#now")).to_contain_text("Nothing listens")
    page.get_by_role("button", name="End the sandbox").click()
    page.get_by_role("button", name="End it now").click()
    expect(page.locator("tr", has_text="mine").locator(".badge")).to_have_text("ended")
    page.goto(address)
    expect(page.locator("#now")).to_contain_text("Nothing of it is left")
    page.goto(f"{address}/files")
    expect(page.get_by_role("alert")).to_contain_text("has ended")
    page.get_by_role("link", name="Go to Sandboxes").click()


def test_a_terminal_is_typed_into_left_by_keys_and_opened_again(page: Page, box: str) -> None:
    """A shell runs in colours and at the size of its place, within the policy for styles; Escape and Tab leave it."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(f"/sandboxes/{box}/terminal")
    rows, state = page.locator(".xterm-rows"), page.locator("#state")
    expect(state).to_have_text("The shell runs.")
    page.keyboard.type("stty size; cat in/a.txt; printf '\\033[38;2;200;30;40mtrue\\033[0m\\n'\n")
    expect(rows).to_contain_text("<b>one</b>")
    size = re.search(r"(\d+) (\d+)<b>", rows.inner_text().replace("\n", ""))
    assert size is not None
    assert int(size[1]) > 10
    assert int(size[2]) > 80
    colour = page.locator("span").get_by_text("true", exact=True).first.evaluate("one => getComputedStyle(one).color")
    assert colour == "rgb(200, 30, 40)"
    assert not said
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    back = page.get_by_role("link", name="Back to the sandbox")
    expect(back).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.type("read -rsn1 key; printf '%q\\n' \"$key\"\n")
    page.keyboard.press("Escape")
    expect(rows).to_contain_text("$'\\E'")  # alone it is the program's
    page.keyboard.type("exit 3\n")
    expect(state).to_have_text("The shell has ended: error, exit 3.")
    page.keyboard.press("Enter")
    expect(state).to_have_text("The shell runs.")
    page.keyboard.type("tty\n")
    expect(rows).to_contain_text("/dev/pts/")


def test_settings_are_changed_by_a_form_that_says_what_is_wrong(page: Page, service: Service) -> None:
    """What was changed is stored and nothing else; a wrong value changes nothing and stays; an empty one is no more."""
    page.goto("/settings")
    wait = page.get_by_label("Time-out")
    wait.fill("12s")
    page.get_by_label("Languages").fill("python, bash")
    with service.client() as client:
        client.put("/api/sandbox/config", json={"memoryLimit": "200m"}).raise_for_status()  # meanwhile
        page.get_by_role("button", name="Change").click()
        expect(page.get_by_role("status").first).to_have_text("Changed: timeout, languages.")
        found = client.get("/api/sandbox/config").json()
        assert (found["timeout"], found["languages"], found["memoryLimit"]) == (12.0, ["python", "bash"], "200m")
        expect(wait).to_have_accessible_description("holds: 12 (set here)")
        wait.fill("soon")
        page.get_by_label("Screen").select_option("warn")
        page.get_by_role("button", name="Change").click()
        expect(page.get_by_role("alert")).to_contain_text("timeout: 'soon' is not a duration")
        expect(wait).to_have_value("soon")
        assert client.get("/api/sandbox/config").json() == found
        page.goto("/run")
        expect(page.get_by_label("Language").locator("option")).to_have_text(["python", "bash"])
        page.goto("/settings")
        for name in ("Time-out", "Languages", "Memory"):
            page.get_by_label(name).fill("")
        page.get_by_role("button", name="Change").click()
        expect(wait).to_have_accessible_description("holds: 30 (default)")
        assert client.get("/api/sandbox/config").json()["origins"]["memoryLimit"] == "default"


def test_a_hostile_output_changes_nothing(
    service: Service, browser: Browser, cookies: StorageState, queue: ApprovalQueue
) -> None:
    """What acts in a page that shows it as it is does nothing in ours: nothing is fetched, run, opened or renamed."""
    with trap() as found, opened(browser, cookies, base_url=service.address) as seen:

        def aimed(outputs: Mapping[str, str]) -> dict[str, str]:
            return {name: text.replace("HIT", found.hit(name)) for name, text in outputs.items()}

        html, text, own = aimed(HOSTILE_HTML), aimed(HOSTILE_TEXT), aimed(ONLY_IN_THE_PAGE)
        found.pages = html | {name: f'<pre title="{one}">{one}</pre>' for name, one in text.items()}
        page = seen.page
        with opened(browser, None) as naive:
            naive.page.goto(found.address)
            naive.page.set_content(
                "".join(f'<iframe src="{found.address}/naive/{name}"></iframe>' for name in found.pages)
            )
            found.wait_for(set(found.pages))
        found.hits.clear()
        words = "".join(f"\n{name}: {one[:60_000]}" for name, one in (html | text | own).items())
        outputs = [{"data": {"text/html": one}, "metadata": {}} for one in html.values()]
        outputs += [{"data": {"image/svg+xml": html[name]}, "metadata": {}} for name in html if "svg" in name]
        outputs += [{"data": {"image/png": f'x" onerror="{text["attribute"]}'}, "metadata": {}}]
        outputs += [{"data": {f"text/x-{text['attribute']}": one}, "metadata": {}} for one in text.values()]
        measure = {"state": text["attribute"], "mechanism": text["close"], "reason": text["close-all"]}
        number = put_run(
            service, stdout=words, stderr=own["huge"], outputs=outputs, sessionId=text["close"][:60], value=html,
            language=text["attribute"], error=text["close-all"], duration=0.1, exitCode=0, truncated=False,
            files=[{"path": one, "size": 1, "sha256": text["attribute"]} for one in (html | text).values()],
            enforcement={text["close"]: measure}, hits={text["attribute"]: 1},
            meta={"backend": text["close"], "level": text["attribute"], "audit": {"run": text["close"]}},
        )  # fmt: skip
        hostile = ApprovalRequest(
            tool=text["close"], risk=Risk.HIGH, arguments=html | text | {text["attribute"]: own["htmx"]}, rules=html,
            changes="\n".join(f"+{one}" for one in html.values()),
        )  # fmt: skip
        with asking(queue, hostile) as came:
            for path in (f"/runs/{number}", "/activity", "/approvals"):
                page.goto(path)
                title = COUNTED.sub("", page.title())  # when what is asked for is counted is not known here
                for frame in page.locator("iframe").all():
                    frame.scroll_into_view_if_needed()
                page.wait_for_load_state("networkidle") if path.startswith("/runs") else page.wait_for_load_state()
                assert page.evaluate(
                    "[document.scripts.length, document.querySelectorAll('pre a, pre img').length]"
                ) == [2, 0]
                assert (page.url, COUNTED.sub("", page.title())) == (service.address + path, title)
            page.get_by_role("button", name="Deny").click()
            expect(page.locator("#waiting")).to_contain_text("Nothing waits")
        assert len(came) == 1
        page.goto("/run")
        page.get_by_label("Code").fill(f"print({words[:200_000]!r}[:60000])")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("#result [data-status]")).to_be_visible()
        expect(page.get_by_label("Output", exact=True)).to_contain_text("<script>")
        assert page.evaluate("[...new Set([...document.querySelectorAll('.stream *')].map(e => e.tagName))]") in (
            [],
            ["SPAN"],
        )
        assert (found.hits, seen.errors, seen.dialogs, len(seen.context.pages)) == (set(), [], [], 1)


def test_a_hostile_sandbox_changes_nothing(service: Service, browser: Browser, cookies: StorageState) -> None:
    """Names, content, commands, output and the terminal of a guest are text: they fetch, open and rename nothing."""
    with trap() as found, opened(browser, cookies, base_url=service.address) as seen:
        page = seen.page
        html = {name: one.replace("HIT", found.hit(name)) for name, one in (HOSTILE_HTML | HOSTILE_TEXT).items()}
        words, name = "\n".join(html.values()), "<img src=x onerror=alert(1)>\n\x1b[31m\u202e"
        steer = f"\x1b]0;owned\x07\x1b]8;;{found.hit('link')}\x07click\x1b]8;;\x07\x1b]52;c;b3duZWQ=\x07\x1b[21t\n"
        asked = {
            "labels": {"a": words[:200]},
            "files": [{"path": f"{name}/{name}", "text": words}, {"path": "steer", "text": steer}],
        }
        with service.client() as client:
            box = client.post("/api/sandboxes", json=asked).raise_for_status().json()["id"]
            argv = ["sh", "-c", "cat */* >&2; cat */*; exec sleep 600", words]
            client.post(f"/api/sandboxes/{box}/processes", json={"argv": argv}).raise_for_status()
        for end in ("", "/processes/1", "/files"):
            page.goto(f"/sandboxes/{box}{end}")
            page.wait_for_load_state()
            assert not page.locator(
                "main :is(img, iframe, svg, script, style, link, object, embed, video, audio)"
            ).count()
        page.get_by_role("link", name="onerror").click()
        page.locator("table").get_by_role("link", name="onerror").click()
        expect(page.get_by_role("region", name="Content")).to_contain_text("<script>")
        page.goto(f"/sandboxes/{box}/terminal")
        title, rows = page.title(), page.locator(".xterm-rows")
        expect(page.locator("#state")).to_have_text("The shell runs.")
        page.keyboard.type("cat steer\n")
        link = rows.get_by_text("click", exact=True)
        link.click()
        link.click(modifiers=["Control"])
        page.keyboard.type("echo still $((6 * 7))\n")
        expect(rows).to_contain_text("still 42")
        assert page.title() == title
        assert (found.hits, seen.errors, seen.dialogs, len(seen.context.pages)) == (set(), [], [], 1)


def test_a_terminal_that_is_flooded_leaves_out_what_it_cannot_show(page: Page, box: str) -> None:
    """Of 6 MB that come at once most is left out, which is said, and what comes afterwards is shown."""

    def flood(socket: WebSocketRoute) -> None:
        socket.on_message(lambda _: socket.send(b"still here\r\n"))
        # The second is more than may wait, however fast the page draws, and with the third it is said.
        for mebibytes in (1, 5):
            socket.send(b"0123456789abcde\n" * (mebibytes << 16))
        socket.send(b"\r\n")

    page.route_web_socket("**/terminal?*", flood)
    page.goto(f"/sandboxes/{box}/terminal")
    rows = page.locator(".xterm-rows")
    expect(rows).to_contain_text("was left out")
    page.locator(".xterm").click()
    page.keyboard.press("a")
    expect(rows).to_contain_text("still here")


def test_frames_of_outputs_hold_nothing_that_acts(service: Service, cookies: StorageState) -> None:
    """The frame's own address, opened by itself, has a policy without scripts, forms and origin; others have none."""
    number = put_run(service, outputs=[{"data": {"text/html": "<script>1</script>"}, "metadata": {}}])
    (cookie,) = cookies["cookies"]
    with service.client("", cookies={cookie["name"]: cookie["value"]}) as client:
        frame = client.get(f"/runs/{number}/frame/0")
        policy = frame.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "sandbox", "form-action 'none'", "frame-ancestors 'self'"} <= set(policy)
        assert not any(word.startswith("script-src") for word in policy)
        assert client.get(f"/runs/{number}/frame/1").status_code == 404
        assert client.get(f"/runs/{number}").headers["x-frame-options"] == "DENY"
    with service.client("") as nobody:
        assert nobody.get(f"/runs/{number}/frame/0").status_code == 401


def violations(page: Page, within: str = "html", **options: Any) -> list[str]:
    """Return what axe finds in an element; by `evaluate`, as the page's policy refuses a script that a test adds."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(Axe().axe_script)
    asked = {"resultTypes": ["violations"], "iframes": False, **options}
    found = page.evaluate("([within, options]) => axe.run(within, options)", [within, asked])["violations"]
    return [f"{one['id']}: {node['html'][:200]}" for one in found for node in one["nodes"]]


def overflow(page: Page) -> int:
    """Return by how many pixels a page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def paths_with_content(service: Service, page: Page, box: str) -> list[str]:
    """Return the parts, and one page of each other kind."""
    number = put_run(
        service, stdout="one\x1b[31mtwo\x1b[0m", stderr="three", error="why", duration=1.5, exitCode=1, value={"a": 1},
        outputs=[{"data": {"text/html": "<table><tr><td>1</td></tr></table>"}}, {"data": {"text/plain": "x"}}],
        files=[{"path": "out.csv", "size": 10, "sha256": "0" * 64}], hits={"timeout": 1}, language="python",
        enforcement={
            state: {"state": state, "mechanism": "how", "reason": "why"} for state in ("enforced", "partial", "absent")
        },
    )  # fmt: skip
    page.goto("/snapshots")
    found = [f"/runs/{number}", *(f"/{part}" for part in PARTS), "/runs/none", "/login", "/login?code=x"]
    found += [f"/sandboxes/{box}{end}" for end in ("", "/processes/1", "/files", "/files?path=in/a.txt", "/terminal")]
    links = page.locator("main th a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    for kind in ("snap_", "ws_"):
        ids = [link for link in links if kind in link]
        found += ids[:1]
        if len(ids) > 1:
            found.append(f"/snapshots/compare?id1={ids[1].rpartition('/')[2]}&id2={ids[0].rpartition('/')[2]}")
    return found


Look = tuple[Literal["light", "dark"], int]


@contextmanager
def visited(
    service: Service, browser: Browser, cookies: StorageState, queue: ApprovalQueue, box: str, look: Look
) -> Iterator[Iterator[Page]]:
    """Give every page one after the other, with something on it."""
    scheme, width = look
    request = ApprovalRequest(tool="deploy", risk=Risk.CRITICAL, arguments={"code": "1\n2", "a": "b"}, rules={"x": 1})
    with (
        opened(browser, cookies, base_url=service.address, width=width, color_scheme=scheme) as seen,
        asking(queue, request),
    ):

        def visit() -> Iterator[Page]:
            for path in paths_with_content(service, seen.page, box):
                seen.page.goto(path)
                if path == "/hosts":
                    expect(seen.page.locator("#doctor .controls")).to_be_visible()
                if path.endswith("/terminal"):
                    expect(seen.page.locator(".xterm-rows")).to_contain_text("$")
                yield seen.page

        yield visit()
        seen.page.goto("/approvals")
        seen.page.get_by_role("button", name="Deny").click()


def test_no_page_has_a_fault_for_people_who_use_other_means(
    service: Service, browser: Browser, cookies: StorageState, queue: ApprovalQueue, box: str
) -> None:
    """Axe finds nothing on any page, dark on a phone, nor a weak contrast where all colours are, in light at a desk."""
    with visited(service, browser, cookies, queue, box, ("dark", 360)) as pages:
        for page in pages:
            assert (violations(page), overflow(page)) == ([], 0), page.url
            if not any(path in page.url for path in WITH_COLOURS):  # the soak has each page in each look
                continue
            page.set_viewport_size({"width": 1280, "height": 900})
            page.emulate_media(color_scheme="light")
            assert (violations(page, runOnly=["color-contrast"]), overflow(page)) == ([], 0), page.url
            page.set_viewport_size({"width": 360, "height": 900})
            page.emulate_media(color_scheme="dark")


@pytest.mark.soak
@pytest.mark.parametrize("width", [360, 768, 1280, 3840])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_fault_in_any_look(
    service: Service, browser: Browser, cookies: StorageState, queue: ApprovalQueue, box: str,
    scheme: Literal["light", "dark"], width: int,
) -> None:  # fmt: skip
    """The same in light and dark, from a phone to a 4k screen."""
    with visited(service, browser, cookies, queue, box, (scheme, width)) as pages:
        for page in pages:
            assert (violations(page), overflow(page)) == ([], 0), page.url


def test_what_is_vendored_is_what_its_note_says() -> None:
    """Each file of others has its licence and the hash that stand beside it, and nothing else is there."""
    note = (VENDOR / "README.md").read_text()
    rows = re.findall(r"\| `(\S+)` \|.*?\| ([0-9.]+) \|.*\| `([0-9a-f]{64})` \|", note)
    for name, _, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
    version = re.search(rb'version:"([0-9.]+)"', (VENDOR / "htmx.min.js").read_bytes())
    assert version is not None
    assert (rows[0][0], rows[0][1]) == ("htmx.min.js", version[1].decode())
    assert "Zero-Clause BSD" in (VENDOR / "htmx.LICENSE").read_text()
    assert "Permission is hereby granted" in (VENDOR / "xterm.LICENSE").read_text()
    there = {one.name for one in VENDOR.iterdir()}
    assert there == {"README.md", "htmx.LICENSE", "xterm.LICENSE", *(name for name, _, _ in rows)}


def test_the_documents_show_three_pictures_of_the_page() -> None:
    """The pictures that these tests take with PICTURES=1 are there, small, and named by the documents."""
    documents = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    for name in PICTURE_NAMES:
        assert 10_000 < (PICTURES / name).stat().st_size < MOST_PICTURE_BYTES
        assert f"pictures/{name}" in documents


def test_templates_and_scripts_say_nothing_inline() -> None:
    """No template has an inline script, style or handler, or an address elsewhere: the policy would refuse them."""
    folder = ROOT / "src" / "cloche" / "server" / "templates"
    forbidden = re.compile(r"<style|\sstyle=|<script(?![^>]*\ssrc=)|\son[a-z]+=|https?://|\|\s*safe\b|javascript:")
    for path in folder.iterdir():
        assert not forbidden.search(path.read_text()), path.name
