"""Packages at a service: by names, and by a lock that the caller sends; the service's own index and rules hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.cloche import ClocheBackend
from cloche.core.errors import InvalidRequest, PolicyDenied, StartFailed
from cloche.core.remote import RemoteAccount
from tests.harness.packages import PackageIndex, own_index, sha256_of
from tests.harness.remote import account_at
from tests.harness.service import Service, serving
from tests.integration.test_packages import _exit_code

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "downloads_outside")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """Serve an index for this user, and give an empty store."""
    with own_index(tmp_path, monkeypatch) as served:
        yield served


@pytest.fixture
def service(index: PackageIndex, tmp_path: Path) -> Iterator[Service]:
    """Serve with the same index; a key below admin may have `one`, and nothing else."""
    home = tmp_path / "service"
    home.mkdir()
    (home / "cloche").mkdir()
    (home / "cloche" / "cloche.yaml").write_text("sandbox: {packages_allow: [one]}")
    variables: dict[str, Any] = {
        "program": ["tests.harness.serve_outside"], "UV_DEFAULT_INDEX": index.url,
        "PYTHONPATH": os.pathsep.join(sys.path), "XDG_DATA_HOME": str(home / "data"),
    }  # fmt: skip
    with serving(home, **variables) as found:
        yield found


@pytest.mark.timeout(180)
def test_a_lock_is_sent_and_holds_there(index: PackageIndex, service: Service, tmp_path: Path) -> None:
    """With it a newer release does not count, for runs and live sandboxes; names alone are resolved there."""
    index.add("one", "1.0")
    lock = tmp_path / "cloche.lock"
    assert _exit_code(["packages", "lock", "one", "--output", str(lock)]) == 0
    index.add("one", "2.0")
    backend = ClocheBackend(_account(service))
    run: dict[str, Any] = {"code": "import one; one.VERSION", "packages": ["one"], "backend": backend}
    locked = cloche.run(**run, locked=lock)
    assert (locked.value, locked.meta["packages"]) == ("1.0", ["one==1.0"]), locked.stderr
    assert cloche.run(**run).value == "2.0"
    with cloche.Sandbox(packages=["one"], locked=lock, backend=backend) as sandbox:
        assert sandbox.exec(["python3", "-c", "import one; print(one.VERSION)"]).stdout == "1.0\n"
    with pytest.raises(InvalidRequest, match="the lock that was sent is for other requirements"):
        cloche.run("1", packages=["one>=1"], locked=lock, backend=backend)
    lock.write_text(lock.read_text().replace(sha256_of(index.wheels["one-1.0-py3-none-any.whl"]), "e" * 64))
    with pytest.raises(StartFailed, match="no file of"):
        cloche.run(**run, locked=lock)


@pytest.mark.timeout(180)
def test_a_service_says_what_it_does_not_permit(index: PackageIndex, service: Service) -> None:
    """A package outside of its list, by the wire and by REST; a lock that is none, and one that is too long."""
    index.add("two")
    with pytest.raises(PolicyDenied, match=r"packages: two is above the service's limit \(one\)"):
        cloche.run("1", packages=["two"], backend=ClocheBackend(_account(service)))
    with service.client(service.new_key("run")) as client:
        body = {"code": "1", "packages": ["one"]}
        refused = client.post("/api/code/exec", json={**body, "packagesLock": "nothing"})
        assert (refused.status_code, "not a lock file" in refused.json()["detail"]) == (422, True), refused.text
        refused = client.post("/api/code/exec", json={**body, "packagesLock": "x" * (1 << 19)})
        assert (refused.status_code, refused.json()["field"]) == (422, "packagesLock"), refused.text


def _account(service: Service) -> RemoteAccount:
    return account_at(service.address, service.new_key("run", "read"))
