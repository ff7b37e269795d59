"""The service below a path of its host, by proxies that take the path away from requests and by some that do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from click.testing import CliRunner, Result
from playwright.sync_api import expect
from websockets.sync.client import connect

from cloche.cli.app import root
from cloche.server import html
from tests.harness.browser import WAIT_MS, chromium, opened
from tests.harness.proxy import proxying
from tests.harness.service import Service, serving, start

ROOT = "/tools/cloche"
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve for all tests of this module."""
    with serving(tmp_path_factory.mktemp("service"), "--root-path", ROOT, "--drain", "2s") as one:
        yield one


def new_link(service: Service, address: str) -> str:
    """Return a login link of the service, as a browser has to open it by way of a proxy."""
    with service.client() as client:
        path = client.post("/api/login-links").raise_for_status().json()["path"]
    return f"{address.removesuffix(ROOT)}{path}"


@pytest.mark.parametrize("strips", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_browser_works_below_the_path(service: Service, strips: bool) -> None:
    """All parts, live output, forms, an upload, a terminal, failed pages and the way out; nothing leads elsewhere."""
    assert urlsplit(service.link).path == f"{ROOT}/login"
    with proxying(service.address, ROOT, strips=strips) as proxy, chromium() as browser:
        with opened(browser, None) as seen:
            page = seen.page
            page.goto(new_link(service, proxy.address))
            page.get_by_role("button", name="Open the service").click()
            page.wait_for_url(f"{proxy.address}/run")
            assert [one["path"] for one in seen.context.cookies()] == [f"{ROOT}/"]

            page.get_by_label("Code").fill("import time\nfor n in range(3):\n    print(n, flush=True)\nprint('over')")
            page.get_by_role("button", name=re.compile("^Run")).click()
            expect(page.get_by_label("Output", exact=True)).to_contain_text("over")

            for part in page.locator("nav a").all():
                part.click()
                expect(part).to_have_attribute("aria-current", "page")
            page.goto(f"{proxy.address}/runs/run_00000000000000000000", referer=f"{proxy.address}/settings")
            page.get_by_role("link", name="Back to the page before").click()
            page.wait_for_url(f"{proxy.address}/settings")

            page.goto(f"{proxy.address}/sandboxes")
            page.get_by_role("button", name="Open a sandbox").click()
            page.wait_for_url(f"{proxy.address}/sandboxes/sb_*")
            box = page.url
            page.goto(f"{box}/files")
            page.get_by_label("Put files here").set_input_files(
                [{"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"}]
            )
            page.get_by_role("button", name="Send").click()
            expect(page.get_by_role("region", name="Files")).to_contain_text("a.txt")
            page.goto(f"{box}/terminal")
            expect(page.locator("#state")).to_have_text("The shell runs.")
            page.keyboard.type("cat a.txt; echo\n")
            expect(page.locator(".xterm-rows")).to_contain_text("text")
            page.goto(box)
            page.get_by_role("button", name="End the sandbox").click()
            page.get_by_role("button", name="End it now").click()
            page.wait_for_url(f"{proxy.address}/sandboxes")

            page.get_by_role("button", name="Log out").click()
            page.wait_for_url(f"{proxy.address}/login")
            assert not seen.context.cookies()
            assert not seen.errors
        assert [path for path in proxy.lost if path != "/favicon.ico"] == []


def test_no_template_and_no_script_has_an_address_without_the_path() -> None:
    """Those of templates get it as they are read; scripts have theirs from there, and none of their own."""
    templates = html._templates()
    sources = [(templates.loader, name) for name in templates.list_templates()]
    read = [templates.preprocess(loader.get_source(templates, name)[0]) for loader, name in sources if loader]
    assert sum(len(re.findall(r"""="{{ address\(''\) }}/""", text)) for text in read) > 60
    assert [found for text in read for found in re.findall(r'[a-z-]+="/[^"]*', text)] == []
    scripts = [asset.content.decode() for name, asset in html.assets().items() if re.fullmatch(r"[a-z]+\.js", name)]
    assert len(scripts) == 3
    assert [found for text in scripts for found in re.findall(r"""["'`]/[a-z][^"'`]*""", text)] == []


@pytest.mark.parametrize("strips", [True, False])
def test_programs_are_led_below_the_path(service: Service, strips: bool) -> None:
    """What an answer redirects to, where OpenAPI says that the routes are, and web sockets."""
    headers = {"Authorization": f"Bearer {service.key}"}
    with proxying(service.address, ROOT, strips=strips) as proxy:
        with httpx.Client(base_url=proxy.address, headers=headers, timeout=60, trust_env=False) as client:
            asked = client.post("/api/code/exec", json={"code": "1"}, headers={"Prefer": "respond-async"})
            assert asked.headers["location"] == f"{ROOT}/api/runs/{asked.json()['id']}"
            assert client.get("/api/openapi.json").json()["servers"] == [{"url": ROOT}]
            slash = client.get("/api/runs/")
            assert slash.next_request is not None
            assert str(slash.next_request.url) == f"{proxy.address}/api/runs"
            assert client.get("", follow_redirects=False).headers["location"] == f"{ROOT}/run"
        where = f"{proxy.address.replace('http', 'ws', 1)}/api/wire"
        with connect(where, additional_headers=headers, proxy=None) as link:
            assert link.recv()


def test_the_command_line_has_a_running_service_make_a_link(service: Service, tmp_path: Path) -> None:
    """With an admin's key of a file or a variable, which goes to no other machine in the clear; no other key does."""
    admin, reader = tmp_path / "admin", tmp_path / "reader"
    admin.write_text(f"{service.key}\n")
    reader.write_text(service.new_key("read"))

    def link(*words: str, **environ: str) -> Result:
        return CliRunner().invoke(root, ["serve", "link", *words], env=environ)

    configured = {"CLOCHE_REMOTE_URL": service.address, "CLOCHE_REMOTE_KEY": service.key}
    for made in (link("--url", service.address, "--key-file", str(admin)), link(**configured)):
        assert made.exit_code == 0, made.stderr
        address = urlsplit(made.stdout.strip())
        assert made.stdout.startswith(f"{service.address}/login?")
        with service.client("") as browser:
            entered = browser.post("/login", data={"code": parse_qs(address.query)["code"][0]})
        assert entered.headers["location"] == f"{ROOT}/run"
    refused = link("--url", service.address, "--key-file", str(reader))
    assert (refused.exit_code, "admin" in refused.stderr) == (125, True)
    in_the_clear = link("--url", "http://service.example", "--key-file", str(admin))
    assert (in_the_clear.exit_code, "not https" in in_the_clear.stderr) == (2, True)
    assert link("--url", service.address, CLOCHE_REMOTE_KEY="").exit_code == 2


def test_a_path_that_would_lead_elsewhere_is_refused(tmp_path: Path) -> None:
    """Such as one that begins as the service's own paths do: nobody could tell then what a proxy has taken away."""
    with pytest.raises(AssertionError, match="--root-path"):
        start(tmp_path, "--root-path", "/api")
