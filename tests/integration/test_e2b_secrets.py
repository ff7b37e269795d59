"""E2B's secrets: the service's own, by E2B's names; a sandbox gets a placeholder, never a value."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.harness import e2b

VALUE = "sk-test-0123456789abcdef"


def test_secrets_are_stored_and_filled(tmp_path: Path) -> None:
    """Five routes by id and name, versions, metadata; a placeholder in a variable; no answer has a value."""
    with e2b.serving(tmp_path) as running, running.http(**{"X-API-KEY": running.key}) as http:
        new = {"name": "My-Token", "value": VALUE, "metadata": {"hosts": "api.example.org", "team": "a"}}
        made = http.post("/secrets", json=new)
        assert made.status_code == 201, made.text
        row = made.json()
        assert (row["name"], row["currentVersion"], row["metadata"]) == ("my-token", 1, new["metadata"])
        assert http.post("/secrets", json=new).status_code == 409
        assert http.post("/secrets", json={**new, "name": "homeless", "metadata": {}}).status_code == 201
        filled = {"templateID": "base", "envVars": {"HOMELESS": "${e2b.secrets.homeless}"}}
        refused = http.post("/v2/sandboxes", json=filled)
        assert (refused.status_code, "hosts" in refused.text) == (400, True)
        assert http.delete("/secrets/homeless").status_code == 204
        changed = http.post("/secrets/my-token", json={"value": VALUE[::-1]})
        assert changed.json()["currentVersion"] == 2
        assert http.get(f"/secrets/{row['secretID']}").json() == http.get("/secrets").json()[0] == changed.json()
        _check_filled(running, http)
        other = running.new_key("run", "read")
        assert http.delete("/secrets/my-token", headers={"X-API-KEY": other}).status_code == 403
        assert http.delete("/secrets/my-token").status_code == 204
        assert http.get("/secrets/my-token").status_code == 404
        assert http.get("/secrets").json() == []


def _check_filled(running: e2b.E2BService, http: httpx.Client) -> None:
    """A sandbox has a placeholder under the secret's own name, and forks have one, too."""
    sandbox = {"templateID": "base", "timeout": 60, "envVars": {"MY_TOKEN": "${e2b.secrets.my-token}", "A": "1"}}
    made = http.post("/v2/sandboxes", json=sandbox)
    assert made.status_code == 201, made.text
    with running.service.client() as api:
        told = api.post(f"/api/sandboxes/sb_{made.json()['sandboxID']}/exec", json={"shell": "echo $MY_TOKEN"}).json()
    placeholder = told["stdout"].strip()
    assert placeholder
    assert placeholder not in (VALUE, VALUE[::-1], sandbox["envVars"]["MY_TOKEN"])  # type: ignore[index]
    for variables in ({"OTHER": "${e2b.secrets.my-token}"}, {"MY_TOKEN": "Bearer ${e2b.secrets.my-token}"}):
        assert http.post("/v2/sandboxes", json={**sandbox, "envVars": variables}).status_code == 400
    unknown = {"NOTHING": "${e2b.secrets.nothing}"}
    assert http.post("/v2/sandboxes", json={**sandbox, "envVars": unknown}).status_code == 400
    forks = http.post(f"/sandboxes/{made.json()['sandboxID']}/fork", json={"count": 1, "timeout": 60})
    assert list(forks.json()[0]) == ["sandbox"], forks.text
