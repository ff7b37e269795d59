"""What a service holds: of its operator, of its projects, and when it stores nothing."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche.config.options import SandboxOptions
from cloche.core.errors import BackendUnavailable, Conflict, InvalidRequest, PolicyDenied
from cloche.core.secrets import Secret
from cloche.records.database import Database
from cloche.records.secrets import list_secrets, store_secret
from cloche.server.secrets import ServiceSecrets, own_key
from cloche.server.service import Service, ServiceOptions
from cloche.wire.callers import Caller

STORED = Secret(value="0123456789stored", hosts=["a.example"])


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Yield a database."""
    database = Database(tmp_path / "records" / "records.db")
    yield database
    database.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return an operator's folder."""
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "secrets.yaml").write_text("KEY: {hosts: [b.example], projects: [mine]}\n")
    return str(tmp_path / "held")


@pytest.fixture
def key(tmp_path: Path) -> str:
    """Return the path of a key."""
    (tmp_path / "key").write_bytes(base64.b64encode(bytes(32)))
    return str(tmp_path / "key")


def test_the_operators_secrets_come_first_and_cannot_be_stored(database: Database, folder: str, key: str) -> None:
    """A project that the operator does not name has the one that it has stored; the time of its use is noted."""
    store = ServiceSecrets(database, folder=folder, key=key)
    sealing = asyncio.run(store.key_for("KEY", "other"))
    with pytest.raises(Conflict, match="the operator of this service holds KEY"):
        asyncio.run(store.key_for("KEY", "mine"))
    with database.writing() as session:
        for project in ("mine", "other"):
            store_secret(session, sealing, "KEY", STORED, project=project, by="key_1")
    assert asyncio.run(store.of("mine", ["KEY"])) == {"KEY": Secret(file=f"{folder}/KEY", hosts=["b.example"])}
    assert asyncio.run(store.of("other", ["KEY"])) == {"KEY": STORED}
    assert [row["heldBy"] for row in asyncio.run(store.list("mine"))] == ["operator"]

    async def write(work: object) -> None:
        with database.writing() as session:
            work(session)  # type: ignore[operator]

    asyncio.run(store.note_uses(write))
    with database.reading() as session:
        used = {project: list_secrets(session, project=project)[0].last_used_at for project in ("mine", "other")}
    assert used["mine"] is None
    assert used["other"] is not None


def test_without_the_package_that_encrypts_the_service_makes_no_key(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts, as one with the extra `server` alone must, and says what is needed when one is stored."""
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "cryptography", None)
        store = ServiceSecrets(database, key=own_key(database.folder))
    assert not store.can_store
    with pytest.raises(BackendUnavailable, match=r"with --e2b and 'cloche\[secrets\]' installed"):
        asyncio.run(store.key_for("KEY", "mine"))
    assert ServiceSecrets(database, key=own_key(database.folder)).can_store


def test_without_a_key_nothing_is_stored_and_nothing_is_opened(database: Database, key: str) -> None:
    """The answers say what the operator can do, and which key is meant."""
    sealing = asyncio.run(ServiceSecrets(database, key=key).key_for("KEY", "mine"))
    with database.writing() as session:
        store_secret(session, sealing, "KEY", STORED, project="mine", by="key_1")
    store = ServiceSecrets(database)
    with pytest.raises(BackendUnavailable, match=r"given no key to encrypt them with\. Start it with --secrets-key"):
        asyncio.run(store.key_for("OTHER", "mine"))
    with pytest.raises(BackendUnavailable, match=r"KEY was stored with another key.*secrets_key"):
        asyncio.run(store.of("mine", ["KEY"]))
    assert [row["usable"] for row in asyncio.run(store.list("mine"))] == [False]


def allowed(database: Database, options: SandboxOptions, name: str, folder: str = "", **own: object) -> dict[str, Any]:
    """Return what a service with these options lets a runner have who names a secret."""
    service = Service(database, ServiceOptions(options=options, secrets_from=folder))
    try:
        caller = Caller(project="mine", scopes=("run",))
        return asyncio.run(service.allowed_options(caller, {**own, "secrets": [name]}))
    finally:
        service.close_files()
        service.writer.close()


def test_a_request_does_not_have_a_secret_open_what_the_operator_limits(database: Database, folder: str) -> None:
    """Beside a list that leaves the rules about a host's methods and paths out, its secret would open all of it."""
    options = SandboxOptions(network_allow=["b.example/GET:/x/*", "c.example"])
    assert allowed(database, options, "KEY", folder)["network_allow"] == options["network_allow"]
    narrower = ["b.example/GET:/x/y"]
    assert allowed(database, options, "KEY", folder, network_allow=narrower)["network_allow"] == narrower
    for others in ([], ["c.example"]):
        with pytest.raises(PolicyDenied, match=r"^networkAllow: every request to b.example is above the service's"):
            allowed(database, options, "KEY", folder, network_allow=others)


def test_a_service_of_a_fleet_passes_names_on(database: Database) -> None:
    """Its nodes hold the values; here they are neither looked up nor refused."""
    assert allowed(database, {"backend": "ray"}, "THEIRS") == {"backend": "ray", "secrets": ["THEIRS"]}


def test_an_operator_may_forbid_the_hosts_of_secrets(database: Database, folder: str, tmp_path: Path) -> None:
    """By a ceiling of the network, whose file the answer does not name, and by no network at all."""
    assert allowed(database, {}, "KEY", folder)["secrets"]["KEY"].hosts == ("b.example",)
    config = tmp_path / "config.yaml"
    config.write_text("ceilings: {network: [good.example]}")
    with pytest.raises(PolicyDenied, match=r"^secrets: a ceiling of the network here excludes hosts of these; ask"):
        allowed(database, {"config": str(config)}, "KEY", folder)
    with pytest.raises(InvalidRequest, match="with network 'off' no host is reached"):
        allowed(database, {"network": "off"}, "KEY", folder)


def test_a_folder_that_cannot_be_used_is_told_at_the_start(database: Database, folder: str) -> None:
    """A table without hosts, and a folder that is none."""
    (Path(folder) / "secrets.yaml").write_text("KEY: {}")
    for place, words in ((folder, "KEY needs hosts"), (f"{folder}/none", "the folder cannot be read: No such file")):
        with pytest.raises(InvalidRequest, match=words):
            ServiceSecrets(database, folder=place).check()
