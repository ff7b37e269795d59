"""The table of configuration keys is whole, and an origin knows what it was made of."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields

import pytest

from cloche.config.autofix_settings import AutoFixSettings
from cloche.config.keys import CEILING_FIELDS, KEYS, LIMIT_FIELDS, Settings
from cloche.config.origins import ARGUMENT, DEFAULT, Origin
from cloche.core.fleet_settings import FleetSettings
from cloche.core.limits import Limits
from cloche.core.policy import Policy


def test_every_setting_has_a_row() -> None:
    """No field of the settings is left out: each is filled by a row, but for those that no source may set."""
    rows = {key.settings_field for key in KEYS if key.settings_field}
    own = {spec.name for spec in fields(Settings)}
    parts = {"limits": Limits, "policy": Policy, "autofix": AutoFixSettings, "fleet": FleetSettings}
    named = {f"{part}.{spec.name}" for part, kind in parts.items() for spec in fields(kind)}
    assert own - rows == {*parts, "ceilings", "images", "roots", "remotes", "origins"}
    assert named - rows == {
        "policy.read_only_root", "policy.writable_paths", "policy.drop_capabilities", "policy.layers",
        "policy.accept_claimed_level", "policy.host_folder", "policy.home", "policy.host_ports", "policy.why",
        "policy.packages_lock", "policy.digests",
        "policy.toolchains", "policy.toolchains_hidden", "policy.toolchains_path", "policy.secrets",
    }  # fmt: skip
    assert rows - own - named == {name for name in rows if name.startswith(("images.", "roots.", "remotes."))}
    assert set(LIMIT_FIELDS.values()) == {spec.name for spec in fields(Limits)}
    assert {
        **LIMIT_FIELDS,
        **{name: name for name in ("users", "network", "packages", "level")},
    } == CEILING_FIELDS


def test_no_two_rows_are_of_one_spelling() -> None:
    """A name, another spelling or a variable belongs to one key."""
    spelled = [f"{key.section}.{spelling}" for key in KEYS for spelling in key.readers()]
    variables = [key.variable for key in KEYS if key.variable]
    for listed in (spelled, variables, [key.name for key in KEYS]):
        assert len(listed) == len(set(listed))


SAID = Origin("/a/cloche.yaml")


@pytest.mark.parametrize(
    ("origin", "text", "kind", "first"),
    [
        (DEFAULT, "default", "default", DEFAULT),
        (SAID, "/a/cloche.yaml", "file", SAID),
        (Origin("/a (b)/preset x"), "/a (b)/preset x", "file", "/a (b)/preset x"),
        (Origin.tier(3), "tier 3", "tier", "tier 3"),
        (Origin.variable("CLOCHE_MEMORY"), "environment CLOCHE_MEMORY", "environment", "environment CLOCHE_MEMORY"),
        (Origin.preset("minimal", ARGUMENT), "preset minimal (argument)", "preset", ARGUMENT),
        (
            Origin.ceiling(SAID, Origin.preset("minimal", ARGUMENT)),
            "ceiling in /a/cloche.yaml (asked by preset minimal (argument))", "ceiling", ARGUMENT,
        ),
        (Origin.joined([DEFAULT, SAID, SAID]), "/a/cloche.yaml", "file", SAID),
        (Origin.joined([DEFAULT, DEFAULT]), "default", "default", DEFAULT),
        (Origin.joined([Origin.tier(3), ARGUMENT]), "tier 3; argument", "several", "tier 3; argument"),
    ],
)  # fmt: skip
def test_an_origin_is_text_with_parts(origin: Origin, text: str, kind: str, first: str) -> None:
    """It reads as it is shown, and nobody takes the text apart to know who asked first; copies are as good."""
    for one in (origin, copy.deepcopy(origin), pickle.loads(pickle.dumps(origin))):
        assert (str(one), one.kind, one.first) == (text, kind, first)
