"""Programs that people run in notebooks, and the packages themselves: they run in a session beside its tasks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.sync import Session

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

PACKAGES = ("django==5.2.*", "joblib==1.5.*", "nest_asyncio==1.6.*")
TICKING = """\
import asyncio, os, sys
sys.path.append('/workspace/packages')
os.environ['PYTHONPATH'] = '/workspace/packages'
async def tick():
    global n
    while True:
        n += 1
        await asyncio.sleep(0)
n, ticking = 0, asyncio.create_task(tick())
"""
DJANGO = """\
import django
from django.conf import settings
settings.configure(
    DATABASES={'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}},
    INSTALLED_APPS=['django.contrib.contenttypes', 'django.contrib.auth'],
)
django.setup()
from django.core.management import call_command
from django.contrib.auth.models import User
call_command('migrate', verbosity=0)
User.objects.create(username='one')
User.objects.count()
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install what the tests import."""
    folder = tmp_path_factory.mktemp("packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", str(folder)]
    subprocess.run([*pip, *PACKAGES], check=True)
    return folder


@pytest.fixture
def session(packages: Path) -> Iterator[Session]:
    """Return a session with the packages, in which a task runs."""
    with cloche.Sandbox(timeout=60, disk="1g") as sandbox:
        sandbox.upload(packages, "/workspace/packages")
        session = sandbox.session()
        assert session.run(TICKING).ok
        yield session


def ticks_on(session: Session) -> None:
    """Show that the task goes on between cells."""
    before = session.run("n").value
    for _ in range(1000):
        if session.run("n").value > before:
            return
    raise AssertionError(before)


def test_django_s_orm_works_beside_a_task(session: Session) -> None:
    """It refuses to work where a loop runs."""
    assert session.run(DJANGO).value == 1
    ticks_on(session)
    assert session.run("User.objects.count()").value == 1
    error = session.run("await asyncio.sleep(0)\nUser.objects.count()").meta["error"]["name"]
    assert error == "SynchronousOnlyOperation"


def test_playwright_s_blocking_calls_work_beside_a_task(session: Session) -> None:
    """They refuse to begin where a loop runs, and leave one of their own as the running one between two calls."""
    begin = "from playwright.sync_api import sync_playwright\nplaywright = sync_playwright().start()"
    assert session.run(f"{begin}\nlen(playwright.devices) > 100").value is True
    ticks_on(session)
    assert session.run("await asyncio.sleep(0, 5)").value == 5
    assert session.run("context = playwright.request.new_context()\ncontext.dispose()").ok
    assert session.run("playwright.stop()").ok
    ticks_on(session)


def test_joblib_s_processes_take_functions_of_cells(session: Session) -> None:
    """With loky, by value; with `multiprocessing` and spawn that is an error at once."""
    code = "import joblib\ndef twice(x): return 2 * x\njoblib.Parallel(2)(joblib.delayed(twice)(x) for x in range(4))"
    assert session.run(code).value == [0, 2, 4, 6]
    by = "joblib.Parallel(2, backend='multiprocessing')(joblib.delayed(twice)(x) for x in range(4))"
    assert session.run(by).value == [0, 2, 4, 6]
    error = session.run(f"import multiprocessing\nmultiprocessing.set_start_method('spawn', force=True)\n{by}")
    assert "get_context('fork')" in error.stderr
    assert (error.status, error.meta["state"]) == ("error", "kept")
    ticks_on(session)


def test_nested_loops_work_beside_a_task(session: Session) -> None:
    """As `nest_asyncio` has it."""
    assert session.run("import nest_asyncio\nnest_asyncio.apply()\nasync def five(): return 5").ok
    assert session.run("await five() + asyncio.run(five())").value == 10
    ticks_on(session)
