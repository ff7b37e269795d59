"""What a skill gets of what it asks for: a pure table."""

from __future__ import annotations

from typing import Any

import pytest

from cloche.config.keys import Settings
from cloche.config.options import SandboxOptions
from cloche.config.origins import ARGUMENT, DEFAULT, Origin
from cloche.core.ceilings import NetworkCeiling
from cloche.core.enforcement import Control, Level
from cloche.core.limits import GIB, MIB, Limits
from cloche.core.policy import Policy
from cloche.core.secrets import Secret
from cloche.execution.secrets import read_with_settings
from cloche.skills.run import SkillTerms, Term, _agreed, decide_terms
from cloche.skills.skill import Card, Script, Skill, SkillManifest, SkillRequests

FILE, CHECKOUT = Origin("/home/op/.config/cloche/cloche.yaml"), Origin("/srv/checkout/cloche.yaml")


def skill_asking(*, runtime: str = "python", **asked: Any) -> Skill:
    """Return a skill of one script."""
    return Skill(
        card=Card(name="demo", description="What it is for."),
        manifest=SkillManifest(asked=SkillRequests(**asked)),
        folder="/skills/demo",
        scripts=(Script(name="go", path="scripts/go", runtime=runtime),),
    )


def term(terms: SkillTerms, key: str) -> Term:
    """Return the one row of a key."""
    (found,) = [one for one in terms.table if one.key == key]
    return found


@pytest.mark.parametrize(
    ("wish", "held", "origin", "ceiling", "result", "why"),
    [
        (None, 256 * MIB, DEFAULT, None, 256 * MIB, ""),
        (None, 256 * MIB, FILE, 2 * GIB, 256 * MIB, ""),
        (128 * MIB, 256 * MIB, DEFAULT, None, 128 * MIB, "as the skill asks"),
        (GIB, 256 * MIB, DEFAULT, None, GIB, "no ceiling"),
        (GIB, 256 * MIB, DEFAULT, 2 * GIB, GIB, "as the skill asks"),
        (GIB, 256 * MIB, DEFAULT, GIB, GIB, "as the skill asks"),
        (4 * GIB, 256 * MIB, DEFAULT, 2 * GIB, 2 * GIB, f"lowered to the operator's ceiling ({FILE})"),
        # A plain value in the operator's file is a default, as a preset there is; a ceiling is what binds.
        (GIB, 512 * MIB, FILE, None, GIB, "no ceiling"),
        (GIB, 512 * MIB, Origin.preset("standard", FILE), None, GIB, "no ceiling"),
        (GIB, 512 * MIB, Origin.tier(3), None, GIB, "no ceiling"),
        (GIB, 128 * MIB, Origin.ceiling(FILE, DEFAULT), 128 * MIB, 128 * MIB, "ceiling"),
        # What is said for this run beats the skill, in both directions.
        (GIB, 300 * MIB, ARGUMENT, None, 300 * MIB, "said for this run (argument)"),
        (64 * MIB, 300 * MIB, ARGUMENT, None, 300 * MIB, "said for this run"),
        (GIB, 300 * MIB, Origin.variable("CLOCHE_MEMORY"), 2 * GIB, 300 * MIB, "environment CLOCHE_MEMORY"),
        (GIB, 128 * MIB, Origin.preset("minimal", ARGUMENT), None, 128 * MIB, "argument"),
        (GIB, 128 * MIB, Origin.preset("minimal", Origin.variable("CLOCHE_PRESET")), None, 128 * MIB, "environment"),
        (64 * MIB, 200 * MIB, Origin.ceiling(FILE, ARGUMENT), 200 * MIB, 200 * MIB, "argument"),
        # The working directory only tightens.
        (GIB, 128 * MIB, CHECKOUT, None, 128 * MIB, "working directory"),
        (64 * MIB, 128 * MIB, CHECKOUT, None, 64 * MIB, "as the skill asks"),
        (GIB, 128 * MIB, Origin.preset("minimal", CHECKOUT), None, 128 * MIB, "working directory"),
    ],
)
def test_an_amount_is_the_skills_within_the_operators_ceiling(
    wish: float | None, held: int, origin: Origin, ceiling: float | None, result: float, why: str
) -> None:
    """A wish takes the place of defaults, yields to what is said for the run, and is lowered to a ceiling."""
    settings = Settings(
        limits=Limits(memory_bytes=held),
        origins={"memory": origin, "ceilings.memory": FILE},
        ceilings={} if ceiling is None else {"memory_bytes": ceiling},
    )
    terms = decide_terms(skill_asking(limits={} if wish is None else {"memory": wish}), settings, checkout={CHECKOUT})
    assert terms.limits["memory"] == result
    assert why in term(terms, "memory").why
    assert bool(why) == bool(term(terms, "memory").why)
    assert not terms.refusals


def test_no_wish_passes_a_ceiling() -> None:
    """Whatever is asked of every limit, no result is above its ceiling."""
    ceilings = {
        "timeout_s": 10.0,
        "memory_bytes": 64 * MIB,
        "cpus": 0.25,
        "pids": 8,
        "disk_bytes": MIB,
        "output_bytes": 99,
    }
    huge = dict.fromkeys(("timeout", "memory", "cpus", "pids", "disk", "output_limit"), 1e9)
    terms = decide_terms(skill_asking(limits=huge), Settings(ceilings=ceilings))
    assert list(terms.limits.values()) == list(ceilings.values())


def test_a_preset_is_below_what_the_skill_says_itself() -> None:
    """A preset in a manifest stands for its amounts; the manifest's own limits win."""
    terms = decide_terms(skill_asking(preset="minimal", limits={"timeout": 5.0}), Settings())
    assert (terms.limits["memory"], terms.limits["timeout"], terms.limits["pids"]) == (128 * MIB, 5.0, 64)


@pytest.mark.parametrize(
    ("asked", "settings", "key", "told"),
    [
        ({"network": "allowlist", "hosts": ("a.example",)}, {}, "network", "a.example"),
        ({"network": "open"}, {}, "network", "open"),
        ({"network": "open"}, {"policy": Policy(network="open")}, "network", "no skill gets more than the hosts"),
        ({"network": "bridge"}, {"policy": Policy(network="bridge")}, "network", "no skill gets more than the hosts"),
        ({"preset": "network-open"}, {}, "network", "open"),
        ({"preset": "network-allowlist"}, {}, "network", "it names no host"),
        ({"packages": ("numpy",)}, {"packages_deny": ("num*",)}, "packages", "numpy may not be installed"),
        (
            {"packages": ("numpy", "six")},
            {"packages_allow": ("six",)},
            "packages",
            "numpy is not in your packages_allow",
        ),
        (
            {"packages": ("numpy",)},
            {"ceilings": {"packages": ("six",)}},
            "packages",
            "above your ceilings.packages (six)",
        ),
        (
            {"packages": "auto"},
            {"ceilings": {"packages": ()}},
            "packages",
            "auto is above your ceilings.packages (none)",
        ),
        ({"packages": ("git+https://evil.example/x",)}, {}, "packages", "names a place to download from"),
        ({"runtime": "csharp"}, {}, "runtime", "csharp is not allowed here (allowed: python, "),
        ({"runtime": "bash"}, {"policy": Policy(languages=("python",))}, "runtime", "bash is not allowed here"),
        ({"tools": ("os.execute",)}, {}, "tools", "tier 3 has no os.execute"),
        ({"tools": ("run_code", "read_file")}, {"tier": 2}, "tools", "tier 2 has no run_code"),
        ({}, {"tier": 1}, "require", "tier 1 (argument) runs no code"),
        ({}, {"tier": 4, "backend": "none"}, "backend", "on the host without a sandbox"),
        ({}, {"backend": "subprocess"}, "backend", '"subprocess" runs code on the host'),
        ({}, {"policy": Policy(level=Level.PROCESS)}, "backend", "on the host without a sandbox"),
    ],
)
def test_what_cannot_be_lowered_is_refused(
    asked: dict[str, Any], settings: dict[str, Any], key: str, told: str
) -> None:
    """The refusal names the key, what is asked for, and what stands against it; there is no result."""
    terms = decide_terms(skill_asking(**asked), Settings(**settings))
    found = [fault for fault in terms.refusals if fault.key == key]
    assert len(found) == 1
    assert told in found[0].problem
    assert (term(terms, key).is_refused, term(terms, key).result) == (True, "")


def test_packages_are_granted_as_the_skill_asks() -> None:
    """In place of those that are configured, which a skill without any gets."""
    configured = Settings(policy=Policy(packages=("six",)))
    assert decide_terms(skill_asking(packages=("numpy>=2",)), configured).packages == ("numpy>=2",)
    assert decide_terms(skill_asking(packages="auto"), Settings()).packages == "auto"
    assert decide_terms(skill_asking(), configured).packages == ("six",)
    listed = Settings(packages_allow=("num*",), ceilings={"packages": ("numpy",)})
    assert decide_terms(skill_asking(packages=("numpy",)), listed).packages == ("numpy",)


def test_all_refusals_come_at_once() -> None:
    """Nothing hides behind the first one."""
    terms = decide_terms(
        skill_asking(network="open", packages=("./x",), tools=("os.execute",), runtime="csharp"), Settings()
    )
    assert [fault.key for fault in terms.refusals] == ["network", "packages", "runtime", "tools"]


def test_tools_and_languages_are_granted_where_the_operator_has_them() -> None:
    """Tier 4 has `os.execute`, and C# is a language where policy names it."""
    settings = Settings(tier=4, backend="local", policy=Policy(languages=("csharp",)))
    assert not decide_terms(skill_asking(tools=("os.execute",), runtime="csharp"), settings).refusals


def test_a_skill_of_the_operators_own_may_have_the_host() -> None:
    """Where tier 4 or an argument says the host, a skill that is marked as trusted runs there; none marks itself."""
    settings = Settings(tier=4, backend="none", policy=Policy(trusted=True))
    assert term(decide_terms(skill_asking(), settings), "backend").result == "none"
    assert "trusted" not in SkillRequests.__dataclass_fields__


def test_what_both_require_is_joined() -> None:
    """The higher level holds, and every control."""
    asked = skill_asking(require_level=Level.CONFINED, require_controls=(Control.PIDS,))
    settings = Settings(policy=Policy(require_level=Level.JAIL, require_controls=(Control.MEMORY,)))
    assert decide_terms(asked, settings).require == ("jail", "memory", "pids")
    assert decide_terms(asked, Settings()).require == ("confined", "pids")
    assert decide_terms(skill_asking(), Settings()).require == ()


@pytest.mark.parametrize(
    ("asked", "network", "is_demanded"),
    [
        ({}, "off", False),
        ({"network": "off"}, "off", True),
        ({}, "open", True),
        ({"network": "allowlist"}, "off", True),
    ],
)
def test_a_skill_that_names_no_host_has_no_network(asked: dict[str, Any], network: Any, is_demanded: bool) -> None:
    """Also where the operator's other runs have one; an empty list of hosts is none."""
    terms = decide_terms(skill_asking(**asked), Settings(policy=Policy(network=network)))
    assert (term(terms, "network").result, terms.is_network_demanded, terms.refusals) == ("off", is_demanded, ())


OPEN = NetworkCeiling(mode="open", networks=("10.0.0.0/8",))


@pytest.mark.parametrize(
    ("hosts", "policy", "ceiling", "refused"),
    [
        (("a.example",), {"network": "allowlist", "network_allow": ("a.example",)}, None, ""),
        (("b.a.example",), {"network": "allowlist", "network_allow": ("*.a.example",)}, None, ""),
        (
            ("a.example", "c.example"),
            {"network": "allowlist", "network_allow": ("a.example",)},
            None,
            "c.example is in",
        ),
        (("a.example:22",), {"network": "allowlist", "network_allow": ("a.example",)}, None, "a.example:22 is in"),
        (("a.example@10.0.0.0/8",), {"network": "allowlist", "network_allow": ("a.example",)}, None, "a.example@10"),
        (("a.example",), {"network_allow": ("a.example",)}, None, "a.example is in neither"),
        (("a.example",), {"network": "open"}, None, ""),
        (("a.example:22",), {"network": "open"}, None, "a.example:22 is in neither"),
        (("a.example:22",), {"network": "open", "network_ports": (22,)}, None, ""),
        (("10.0.0.5",), {"network": "open"}, None, "10.0.0.5 is in neither"),
        (("a.example",), {"network": "bridge"}, None, "a.example is in neither"),
        (
            ("a.example",),
            {"network": "open", "network_deny": ("*.example",)},
            None,
            "network_deny has *.example",
        ),
        (("a.example",), {}, NetworkCeiling(mode="allowlist", hosts=("a.example",)), ""),
        (("b.example",), {}, NetworkCeiling(mode="allowlist", hosts=("a.example",)), "b.example is in neither"),
        (("a.example",), {}, NetworkCeiling(mode="allowlist"), "a.example is in neither"),
        (("a.example", "10.0.0.5", "db@10.0.0.0/8"), {}, OPEN, ""),
        (("db@192.168.0.0/16",), {}, OPEN, "db@192.168.0.0/16 is in neither"),
        (("a.example",), {"network_deny": ("a.example",)}, OPEN, "network_deny has a.example"),
    ],
)
def test_hosts_are_granted_where_the_operator_covers_each(
    hosts: tuple[str, ...], policy: dict[str, Any], ceiling: NetworkCeiling | None, refused: str
) -> None:
    """A skill gets exactly the hosts that it names, or is refused with the first one that nobody allows."""
    settings = Settings(policy=Policy(**policy), ceilings={} if ceiling is None else {"network": ceiling})
    terms = decide_terms(skill_asking(network="allowlist", hosts=hosts), settings)
    found = term(terms, "network")
    assert terms.hosts == (() if refused else hosts)
    assert found.result == ("" if refused else f"allowlist: {', '.join(hosts)}")
    assert refused in found.why
    assert bool(found.why) == bool(refused)


@pytest.mark.parametrize(
    ("origin", "is_granted"),
    [(DEFAULT, True), (FILE, True), (ARGUMENT, False), (Origin.variable("CLOCHE_NETWORK"), False), (CHECKOUT, False)],
)
def test_a_ceiling_grants_no_network_that_was_switched_off(origin: Origin, is_granted: bool) -> None:
    """What is said for this run wins over a skill, and so does a file that tightens."""
    settings = Settings(
        origins={"network": origin}, ceilings={"network": NetworkCeiling(mode="allowlist", hosts=("a.example",))}
    )
    asked = skill_asking(network="allowlist", hosts=("a.example",))
    assert bool(decide_terms(asked, settings, checkout={CHECKOUT}).hosts) is is_granted


def test_one_script_is_judged_by_its_own_language() -> None:
    """A sibling that may not run here does not stand in the way."""
    settings = Settings(policy=Policy(languages=("python",)))
    two = (Script(name="a", path="a.py", runtime="python"), Script(name="b", path="b.rb", runtime="ruby"))
    skill = Skill(card=Card(name="x", description="x"), manifest=SkillManifest(), folder="/x", scripts=two)
    assert [len(decide_terms(skill, settings, script=script).refusals) for script in (None, *two)] == [1, 0, 1]


def test_a_skills_hosts_leave_out_no_rule_that_limits_those_of_a_secret() -> None:
    """Beside a secret of its caller: it would open all of a host of which the caller allows some requests."""
    rules = ("a.example/GET:/x/*", "b.example", "c.example/GET:/y")
    settings = Settings(policy=Policy(network="allowlist", network_allow=rules))
    terms = decide_terms(skill_asking(network="allowlist", hosts=("b.example", "c.example/GET:/y")), settings)
    options = SandboxOptions(secrets={"KEY": Secret(value="0123456789abcdef", hosts=["a.example"])})
    _, agreed = read_with_settings({"network_allow": _agreed(options, terms, settings)["network_allow"], **options})
    assert agreed.policy.network_allow == ("b.example", "c.example/GET:/y", "a.example/GET:/x/*")
    assert _agreed(SandboxOptions(), terms, settings)["network_allow"] == ("b.example", "c.example/GET:/y")
