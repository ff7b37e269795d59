"""Agents of the service's user on the page: what they have changed, and what is written of it from there."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, StorageState, expect

from cloche.coding_agents.launch import opened as agent_opened
from cloche.coding_agents.launch import prepare
from cloche.coding_agents.places import AgentPlace
from cloche.coding_agents.plan import AgentOptions, Program
from cloche.sync import Sandbox
from tests.harness.browser import chromium, opened
from tests.harness.service import Service, environment, serving

pytestmark = [pytest.mark.timeout(240)]

LINES = "".join(f"line {number}\n" for number in range(60))
# Hidden text behind a carriage return, a name that is markup, a file that runs on the host by itself.
CHANGES = r"""
sed -i 's/^line 3$/three/; s/^line 50$/fifty/' long.txt
printf 'harmless\rrm -rf ~\n' > note.txt
echo x > '<img src=x onerror=alert(1)>'
printf '#!/bin/sh\n' > .envrc
echo mine > both.txt
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Be the home of a user with a project, in which an agent has changed files."""
    found = tmp_path_factory.mktemp("home")
    (found / "project").mkdir()
    (found / "project" / "long.txt").write_text(LINES)
    (found / "project" / "both.txt").write_text("before\n")
    return found


@pytest.fixture(scope="module")
def agent(home: Path) -> Iterator[AgentPlace]:
    """Open an agent's sandbox as the user would, and have it change the project."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(home).items():
            patch.setenv(name, value)
        options = AgentOptions(settings={"lifetime": 240, "keep": 240})
        launch = prepare("claude", str(home / "project"), options, program=Program(words=("true",)))

        async def changed() -> None:
            async with agent_opened(launch, lambda _: None) as sandbox:
                done = await sandbox.exec(["sh", "-c", CHANGES], cwd=launch.cwd)
                assert done.ok, done.stderr

        asyncio.run(changed())
        (home / "project" / "both.txt").write_text("theirs\n")
        yield launch.place


@pytest.fixture(scope="module")
def service(home: Path, agent: AgentPlace) -> Iterator[Service]:
    """Serve with --agents."""
    with serving(home, "--agents") as found:
        yield found
        with Sandbox.attach(agent.sandbox) as sandbox:
            sandbox.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Hold one browser, for all tests of this file."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def cookies(service: Service, browser: Browser) -> StorageState:
    """Log in by the printed link."""
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


def test_changes_are_reviewed_written_and_discarded_on_the_page(page: Page, agent: AgentPlace, home: Path) -> None:
    """Dangers come first and are not chosen, hidden text is shown, hunks are chosen, discarded changes are saved."""
    project = home / "project"
    page.goto("/sandboxes")
    page.get_by_role("link", name=agent.sandbox).click()
    expect(page.get_by_role("heading", name="5 files changed")).to_be_visible()
    files = page.locator("ol.requests > li")
    expect(files.first).to_contain_text(".envrc")
    expect(files.first).to_contain_text("It is written only if you choose it here")
    assert not files.first.get_by_role("checkbox").first.is_checked()
    conflict = files.filter(has_text="both.txt")
    expect(conflict).to_contain_text("conflict:")
    assert conflict.get_by_role("checkbox").first.is_disabled()
    expect(files.filter(has_text="<img src=x onerror=alert(1)>")).to_have_count(1)
    note = files.filter(has_text="note.txt")
    note.locator("summary").click()
    expect(note.locator("pre")).to_contain_text("harmless\\x0drm -rf ~")
    long = files.filter(has_text="long.txt")
    long.locator("summary").click()
    long.get_by_label("this part").last.uncheck()
    files.filter(has_text="<img").get_by_role("checkbox").first.uncheck()
    page.get_by_role("button", name="Write the chosen changes").click()
    expect(page.get_by_role("status").first).to_contain_text("wrote 2 of 5 changes")
    assert (project / "long.txt").read_text() == LINES.replace("line 3\n", "three\n")
    assert (project / "note.txt").exists()
    assert sorted(path.name for path in project.iterdir()) == ["both.txt", "long.txt", "note.txt"]
    page.get_by_role("button", name="Discard all changes").click()
    page.get_by_role("button", name="Discard them").click()
    expect(page.get_by_role("status").first).to_contain_text("they are saved in")
    expect(page.get_by_text("Nothing is changed.")).to_be_visible()
    (archive,) = Path(agent.saved).glob("discarded-*.tar")
    with tarfile.open(archive) as saved:
        assert {"files/.envrc", "files/long.txt"} <= set(saved.getnames())


def test_only_changes_that_were_shown_are_written(page: Page, agent: AgentPlace, home: Path) -> None:
    """What the agent changes after the page was made is not written with it."""
    with Sandbox.attach(agent.sandbox) as sandbox:
        sandbox.exec(["sh", "-c", "echo a > a.txt"], cwd=agent.folder)
        page.goto(f"/agents/{agent.sandbox}")
        sandbox.exec(["sh", "-c", "echo other > a.txt"], cwd=agent.folder)
        sandbox.pause()
        other = page.context.new_page()
        other.goto(page.url)
        expect(other.get_by_text("It is paused")).to_be_visible()
        sandbox.resume()
    page.get_by_role("button", name="Write the chosen changes").click()
    expect(page.get_by_text("the changes are others than those that were shown")).to_be_visible()
    assert not (home / "project" / "a.txt").exists()


def test_no_key_of_a_program_reaches_an_agent(service: Service, agent: AgentPlace) -> None:
    """The page takes the cookie alone."""
    with service.client() as client:
        assert client.get(f"/agents/{agent.sandbox}").status_code == 401
        assert client.post(f"/agents/{agent.sandbox}/commit", data={"id": "0" * 64}).status_code == 401
