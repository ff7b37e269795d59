"""Which source wins, and what the result says about it."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cloche.config.keys import Settings
from cloche.config.settings import check_runnable, load_settings
from cloche.core.enforcement import Control, Level
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.limits import GIB, MIB
from cloche.core.policy import BACKENDS


class Host:
    """A home and a working directory of the test's own."""

    def __init__(self, root: Path) -> None:
        self.home, self.cwd = root / "home", root / "work"
        for folder in (self.home / ".cloche", self.home / ".config" / "cloche", self.cwd):
            folder.mkdir(parents=True)
        self.own_yaml = self.home / ".config" / "cloche" / "config.yaml"
        self.own_json = self.home / ".cloche" / "config.json"

    def load(
        self, arguments: Mapping[str, Any] | None = None, *, config_file: Path | None = None, **environ: str
    ) -> Settings:
        return load_settings(arguments, environ=environ, cwd=self.cwd, home=self.home, config_file=config_file)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with empty folders."""
    return Host(tmp_path)


def test_local_default(host: Host) -> None:
    """Where nothing is configured the backend is local, with the limits of the mission's table."""
    settings = host.load()
    assert (settings.backend, settings.tier, settings.preset) == ("local", None, None)
    assert (settings.limits.timeout_s, settings.limits.memory_bytes, settings.limits.cpus) == (
        30.0,
        256 * MIB,
        0.5,
    )
    assert (settings.limits.pids, settings.limits.disk_bytes, settings.limits.output_bytes) == (
        64,
        256 * MIB,
        65536,
    )
    assert settings.policy.network == "off"
    assert set(settings.origins.values()) == {"default"}


def test_docker_opt_in(host: Host) -> None:
    """SANDBOX_TYPE chooses the backend, in any case, and the origin says so."""
    settings = host.load(SANDBOX_TYPE=" Docker ")
    assert settings.backend == "docker"
    assert settings.origins["backend"] == "environment SANDBOX_TYPE"


@pytest.mark.parametrize("name", BACKENDS)
def test_every_known_backend_is_accepted(host: Host, name: str) -> None:
    """All names of the mission can be chosen by the environment."""
    assert host.load(SANDBOX_TYPE=name.upper()).backend == name


def test_unknown_type(host: Host) -> None:
    """An unknown SANDBOX_TYPE is refused with where it came from and every known name."""
    with pytest.raises(InvalidRequest, match=r"environment SANDBOX_TYPE: unknown backend 'dokcer'") as caught:
        host.load(SANDBOX_TYPE="dokcer")
    assert all(name in str(caught.value) for name in BACKENDS)


def test_unknown_type_in_an_argument(host: Host) -> None:
    """An unknown backend as an argument names the argument."""
    with pytest.raises(InvalidRequest, match=r"^backend: unknown backend 'podman'"):
        host.load({"backend": "podman"})


def test_timeout_override(host: Host) -> None:
    """SANDBOX_TIMEOUT_SEC wins over everything, arguments included, in both directions."""
    assert host.load({"timeout": 5}, SANDBOX_TIMEOUT_SEC="7").limits.timeout_s == 7
    settings = host.load({"timeout": "2m", "preset": "standard"}, SANDBOX_TIMEOUT_SEC="1.5")
    assert settings.limits.timeout_s == 1.5
    assert settings.origins["timeout"] == "environment SANDBOX_TIMEOUT_SEC"


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_timeout_override_must_be_a_duration(host: Host, text: str) -> None:
    """A wrong SANDBOX_TIMEOUT_SEC is an error that names it, never "no limit"."""
    with pytest.raises(InvalidRequest, match="environment SANDBOX_TIMEOUT_SEC"):
        host.load(SANDBOX_TIMEOUT_SEC=text)


def test_empty_variables_say_nothing(host: Host) -> None:
    """An empty variable is the same as none."""
    settings = host.load(SANDBOX_TYPE="", SANDBOX_TIMEOUT_SEC=" ", CLOCHE_MEMORY="", CLOCHE_CONFIG="")
    assert set(settings.origins.values()) == {"default"}


def test_yaml_of_the_first_seed(host: Host) -> None:
    """M4's config.yaml means tier 3, docker, 256 MiB, half a CPU, no network, 30 seconds."""
    host.own_yaml.write_text(
        "tier: 3\nsandbox:\n  backend: docker  # or another\n  memory_limit: 256m\n  cpu_limit: 0.5\n"
        "  network: false\n  timeout: 30s\n"
    )
    settings = host.load()
    assert (settings.tier, settings.backend, settings.policy.network) == (3, "docker", "off")
    assert (settings.limits.memory_bytes, settings.limits.cpus, settings.limits.timeout_s) == (
        256 * MIB,
        0.5,
        30.0,
    )
    assert settings.policy.require_level is Level.JAIL
    assert settings.origins["memory"] == str(host.own_yaml)
    assert settings.origins["require"] == "tier 3"


def test_json_of_the_fourth_seed(host: Host) -> None:
    """C8's JSON counts a bare time-out in milliseconds and ignores what is outside `sandbox`."""
    document = {
        "theme": "dark",
        "sandbox": {
            "runtime": "gvisor",
            "languages": ["python", "javascript", "typescript", "bash", "ruby", "go", "rust"],
            "timeout": 30000,
            "memoryLimit": "512m",
            "outputLimit": 102400,
        },
    }
    host.own_json.write_text(json.dumps(document))
    settings = host.load()
    assert (settings.backend, settings.limits.timeout_s, settings.limits.memory_bytes) == (
        "gvisor",
        30.0,
        512 * MIB,
    )
    assert settings.limits.output_bytes == 102400


def test_units_of_a_timeout(host: Host) -> None:
    """Only the spelling `timeout` in JSON is in milliseconds, and only without a unit."""
    host.own_json.write_text('{"sandbox": {"timeout": "45s"}}')
    assert host.load().limits.timeout_s == 45
    host.own_json.write_text('{"sandbox": {"Timeout": 45}}')
    assert host.load().limits.timeout_s == 45
    host.own_json.unlink()
    host.own_yaml.write_text("sandbox: {timeout: 45}")
    assert host.load().limits.timeout_s == 45


@pytest.mark.parametrize(
    ("text", "word", "value"),
    [
        ("memory: 512m", "memory_bytes", 512 * MIB),
        ("memory_limit: 512M", "memory_bytes", 512 * MIB),
        ("memoryLimit: 512MB", "memory_bytes", 512 * MIB),
        ("MemoryLimitBytes: 536870912", "memory_bytes", 512 * MIB),
        ("cpu_limit: 0.5", "cpus", 0.5),
        ("CpuLimitPercent: 50", "cpus", 0.5),
        ("timeout: 30s", "timeout_s", 30.0),
        ("Timeout: 12", "timeout_s", 12.0),
        ("outputLimit: 1000", "output_bytes", 1000),
        ("maxOutputBytes: 1000", "output_bytes", 1000),
        ("output_limit: 1k", "output_bytes", 1024),
        ("pids: 7", "pids", 7),
        ("disk: 1g", "disk_bytes", GIB),
    ],
)
def test_spellings_of_limits(host: Host, text: str, word: str, value: float) -> None:
    """Every spelling of every seed is accepted in a file."""
    host.own_yaml.write_text(f"sandbox: {{{text}}}")
    assert getattr(host.load().limits, word) == value


@pytest.mark.parametrize(
    ("text", "network", "hosts"),
    [
        ("network: false", "off", ()),
        ("network: true", "open", ()),
        ("NetworkEnabled: true", "open", ()),
        ("NetworkEnabled: off", "off", ()),
        ("NetworkEnabled: true, NetworkAllowList: [Packages.Example]", "allowlist", ("packages.example",)),
        ("NetworkEnabled: true, NetworkAllowList: []", "allowlist", ()),
        ("NetworkEnabled: false, NetworkAllowList: [packages.example]", "off", ("packages.example",)),
        ("network: allowlist", "allowlist", ()),
        ("network: [a.example, '*.b.example:8443']", "allowlist", ("a.example", "*.b.example:8443")),
    ],
)
def test_spellings_of_the_network(host: Host, text: str, network: str, hosts: tuple[str, ...]) -> None:
    """A list of hosts narrows a network that is on, and an empty list means none."""
    host.own_yaml.write_text(f"sandbox: {{{text}}}")
    policy = host.load().policy
    assert (policy.network, policy.network_allow) == (network, hosts)


def test_open_network_beside_a_list_is_a_mistake(host: Host) -> None:
    """`open` and a list of hosts in one file contradict each other."""
    host.own_yaml.write_text("sandbox: {network: open, network_allow: [packages.example]}")
    with pytest.raises(InvalidRequest, match=r"sandbox\.network is open but sandbox\.network_allow"):
        host.load()


def test_other_keys_of_a_file(host: Host) -> None:
    """Packages, languages, images, screen, requirements and exceptions come from a file too."""
    host.own_yaml.write_text(
        "sandbox:\n  PythonPackages: [numpy, 'pandas>=2']\n  languages: [Python, csharp]\n  screen: block\n"
        "  images: {python: 'python:3.11-slim'}\n  require: [jail, memory]\n  best_effort: [cpu]\n"
    )
    settings = host.load()
    policy = settings.policy
    assert policy.packages == ("numpy", "pandas>=2")
    assert (policy.languages, policy.screen) == (("python", "csharp"), "block")
    assert (policy.require_level, policy.require_controls) == (Level.JAIL, (Control.MEMORY,))
    assert policy.best_effort == (Control.CPU,)
    assert (settings.image_for("python"), settings.image_for("go")) == ("python:3.11-slim", None)


def test_two_spellings_that_disagree(host: Host) -> None:
    """Two spellings of one thing with different values are an error that names both; with one value they are
    not.
    """
    host.own_yaml.write_text("sandbox: {memory: 1g, MemoryLimitBytes: 2}")
    with pytest.raises(InvalidRequest, match="below the smallest"):
        host.load()
    host.own_yaml.write_text("sandbox: {memory: 1g, memoryLimit: 512m}")
    with pytest.raises(InvalidRequest, match=r"config\.yaml: sandbox\.memory and sandbox\.memoryLimit"):
        host.load()
    host.own_yaml.write_text("backend: docker\nsandbox: {runtime: Docker}")
    assert host.load().backend == "docker"


def test_rank_of_sources(host: Host) -> None:
    """Arguments win over the environment, it over files, they over the tier, it over defaults."""
    host.own_yaml.write_text("tier: 4\nsandbox: {memory: 100m, pids: 10, backend: gvisor}")
    settings = host.load({"memory": "300m"}, CLOCHE_MEMORY="200m", CLOCHE_PIDS="20")
    assert (settings.limits.memory_bytes, settings.limits.pids) == (300 * MIB, 20)
    assert (settings.tier, settings.backend) == (4, "gvisor")
    assert settings.origins["memory"] == "argument"
    assert settings.origins["pids"] == "environment CLOCHE_PIDS"
    assert settings.origins["backend"] == str(host.own_yaml)


def test_rank_of_files(host: Host) -> None:
    """The file that is named wins over the platform's folder, which wins over ~/.cloche."""
    host.own_json.write_text('{"sandbox": {"memory": "100m", "pids": 10, "cpus": 0.1}}')
    host.own_yaml.write_text("sandbox: {memory: 200m, pids: 20}")
    named = host.home / "mine.yml"
    named.write_text("memory: 300m")
    limits = host.load(config_file=named).limits
    assert (limits.memory_bytes, limits.pids, limits.cpus) == (300 * MIB, 20, 0.1)
    assert host.load(CLOCHE_CONFIG=str(named)).limits.memory_bytes == 300 * MIB
    assert host.load({"config": str(named)}).limits.memory_bytes == 300 * MIB


def test_named_file_must_exist(host: Host) -> None:
    """A file that was named and is not there is an error, never skipped."""
    with pytest.raises(InvalidRequest, match="environment CLOCHE_CONFIG: there is no file"):
        host.load(CLOCHE_CONFIG="/nowhere/cloche.yaml")
    with pytest.raises(InvalidRequest, match=r"ends in \.yaml"):
        host.load(config_file=Path("/nowhere/cloche.toml"))


def test_preset_ranks_where_it_was_chosen(host: Host) -> None:
    """`--preset` beats a file's memory; an explicit memory beats `--preset`; a file's preset yields to
    both.
    """
    host.own_yaml.write_text("preset: standard\nsandbox: {memory: 100m}")
    assert host.load().limits.memory_bytes == 100 * MIB
    assert host.load().limits.timeout_s == 300
    chosen = host.load({"preset": "minimal"})
    assert (chosen.limits.memory_bytes, chosen.limits.timeout_s, chosen.preset) == (128 * MIB, 30, "minimal")
    assert chosen.origins["memory"] == "preset minimal (argument)"
    assert host.load({"preset": "minimal", "memory": "64m"}).limits.memory_bytes == 64 * MIB
    assert host.load({"memory": "64m"}, CLOCHE_PRESET="minimal").limits.memory_bytes == 64 * MIB


def test_a_preset_takes_back_what_a_wider_one_gave(host: Host) -> None:
    """Choosing another preset leaves nothing of the one below it, its network least of all."""
    host.own_yaml.write_text("preset: network-open\n")
    assert host.load().policy.network == "open"
    assert host.load({"preset": "standard"}).policy.network == "off"
    host.own_yaml.write_text("preset: locked-down\n")
    assert host.load().policy.user == "nobody"
    assert host.load({"preset": "standard"}).policy.user is None


def test_unknown_preset_and_tier_name_their_source(host: Host) -> None:
    """A wrong name says where it stands and what is known."""
    with pytest.raises(InvalidRequest, match=r"environment CLOCHE_PRESET.*known presets: standard"):
        host.load(CLOCHE_PRESET="big")
    with pytest.raises(InvalidRequest, match=r"^tier: unknown tier 5; known tiers: 1, 2, 3, 4"):
        host.load({"tier": 5})
    with pytest.raises(InvalidRequest, match="unknown tier True"):
        host.load({"tier": True})


@pytest.mark.parametrize("tier", [1, 2])
def test_tiers_without_code(host: Host, tier: int) -> None:
    """Tiers 1 and 2 hold backend none and refuse to run, with the remedy."""
    settings = host.load({"tier": tier})
    assert settings.backend == "none"
    with pytest.raises(PolicyDenied, match=rf"tier {tier} \(argument\) runs no code; choose tier 3"):
        check_runnable(settings)


def test_tier_3_requires_a_jail(host: Host) -> None:
    """Tier 3 requires at least a jail, whatever a lower requirement says; a higher one stands."""
    assert host.load({"tier": 3, "require": "process"}).policy.require_level is Level.JAIL
    assert host.load({"tier": 3, "require": "vm"}).policy.require_level is Level.VM
    check_runnable(host.load({"tier": 3}))


@pytest.mark.parametrize("backend", ["none", "subprocess"])
def test_backend_outside_its_tier(host: Host, backend: str) -> None:
    """A backend that the tier does not list is a configuration error that names both sources."""
    with pytest.raises(InvalidRequest, match=rf"tier 3 \(argument\) does not allow backend '{backend}' \(environ"):
        host.load({"tier": 3}, SANDBOX_TYPE=backend)


def test_tier_4_runs_on_the_host_unless_asked(host: Host) -> None:
    """Tier 4 means the host; a sandbox only where one is chosen."""
    assert host.load({"tier": 4}).backend == "none"
    check_runnable(host.load({"tier": 4}))
    assert host.load({"tier": 4, "backend": "docker"}).backend == "docker"
    with pytest.raises(PolicyDenied, match="level jail is required"):
        check_runnable(host.load({"tier": 4, "require": "jail"}))


def test_none_without_a_tier_is_refused_at_run_time(host: Host) -> None:
    """The host is never chosen by a backend's name alone."""
    with pytest.raises(InvalidRequest, match=r'backend "none" \(environment SANDBOX_TYPE\).*set tier 4'):
        check_runnable(host.load(SANDBOX_TYPE="none"))


def test_subprocess_is_level_process(host: Host) -> None:
    """`subprocess` asks for level process exactly, and refuses when more is required."""
    assert host.load({"backend": "subprocess"}).policy.level is Level.PROCESS
    check_runnable(host.load({"backend": "subprocess"}))
    with pytest.raises(PolicyDenied, match="backend 'subprocess' is to run at level process"):
        check_runnable(host.load({"backend": "subprocess", "require": "jail"}))


@pytest.mark.parametrize("asked", [{"backend": "subprocess"}, {"level": "process"}, {"level": Level.PROCESS}])
def test_a_child_process_has_the_screen_unless_somebody_said_which(host: Host, asked: dict[str, Any]) -> None:
    """The validator of level process is `block` (R2b); a jail, and the host of tier 4, have none by themselves."""
    settings = host.load(asked)
    assert (settings.policy.screen, settings.origins["screen"]) == ("block", "argument")
    for said in ("off", "warn"):
        assert host.load({**asked, "screen": said}).policy.screen == said
        assert host.load(asked, CLOCHE_SCREEN=said).policy.screen == said
    assert host.load({}).policy.screen == host.load({"tier": 4}).policy.screen == "off"


def test_runc_is_docker_with_its_own_runtime(host: Host) -> None:
    """`runtime: runc` is backend docker at level jail (C3), until something stronger names another backend."""
    host.own_yaml.write_text("sandbox: {runtime: Runc}")
    settings = host.load()
    assert (settings.backend, settings.policy.runtime, settings.policy.level) == ("docker", "runc", Level.JAIL)
    assert settings.origins["level"] == settings.origins["runtime"] == str(host.own_yaml)
    assert host.load({"backend": "docker"}).policy.runtime == "runc"
    for other in ("local", "gvisor", "auto"):
        found = host.load({"backend": other})
        assert (found.backend, found.policy.runtime, found.policy.level) == (other, None, None)
    assert (host.load({"runtime": "RunSC"}).backend, host.load({"runtime": "runsc"}).policy.runtime) == ("gvisor", None)
    host.own_yaml.write_text("sandbox: {runtime: gvisor}")
    assert host.load({"runtime": "runc"}).policy.runtime == "runc"
    for contradiction in ({"runtime": "runc", "backend": "gvisor"}, {"runtime": "runc", "level": "gvisor"}):
        with pytest.raises(InvalidRequest, match=r"keep one of them|drop one"):
            check_runnable(host.load(contradiction))
    with pytest.raises(PolicyDenied, match="gvisor is required"):
        check_runnable(host.load({"runtime": "runc", "require": "gvisor"}))
    with pytest.raises(InvalidRequest, match="or runc: docker's own runtime"):
        host.load({"runtime": "crun"})


def test_require_keeps_what_is_not_named(host: Host) -> None:
    """A requirement for a control does not drop the level that the file requires."""
    host.own_yaml.write_text("sandbox: {require: jail}")
    policy = host.load({"require": ["memory"]}).policy
    assert (policy.require_level, policy.require_controls) == (Level.JAIL, (Control.MEMORY,))


def test_ceilings_cap_everything(host: Host) -> None:
    """An owner's ceiling holds against arguments and the global override, and the origin says so."""
    host.own_yaml.write_text("ceilings: {memory: 1g, timeout: 60s, cpu_limit: 2}")
    settings = host.load({"memory": "4g", "cpus": 1}, SANDBOX_TIMEOUT_SEC="3600")
    assert (settings.limits.memory_bytes, settings.limits.timeout_s, settings.limits.cpus) == (GIB, 60, 1)
    assert settings.ceilings == {"memory_bytes": GIB, "timeout_s": 60, "cpus": 2}
    assert settings.origins["memory"] == f"ceiling in {host.own_yaml} (asked by argument)"
    assert "ceiling" not in settings.origins["cpus"]


def test_ceilings_of_several_files_join(host: Host) -> None:
    """The lowest ceiling wins, so that naming another file does not lift one."""
    host.own_json.write_text('{"ceilings": {"memory": "128m", "timeout": 5000}}')
    named = host.home / "mine.yaml"
    named.write_text("ceilings: {memory: 1g}")
    settings = host.load({"memory": "4g"}, CLOCHE_CONFIG=str(named))
    assert (settings.limits.memory_bytes, settings.limits.timeout_s) == (128 * MIB, 5)


@pytest.mark.parametrize(
    ("own", "named", "asked", "holds"),
    [
        ("", "", True, True),
        ("ceilings: {users: true}", "", True, True),
        ("ceilings: {users: true}", "", None, False),
        ("users: true\nceilings: {users: false}", "", None, False),
        ("ceilings: {users: false}", "ceilings: {users: on}\nusers: on", True, False),
        ("ceilings: {users: on}", "ceilings: {users: off}", True, False),
        ("ceilings: {memory: 1g}", "", True, True),
    ],
)
def test_a_ceiling_of_users(host: Host, own: str, named: str, asked: bool | None, holds: bool) -> None:
    """False lowers what any source asks for, whichever file says so; true, and none, let everybody choose."""
    host.own_yaml.write_text(own)
    mine = host.home / "mine.yaml"
    mine.write_text(named)
    assert host.load({"users": asked}, CLOCHE_CONFIG=str(mine)).policy.users is holds


def test_a_ceiling_of_users_is_shown(host: Host) -> None:
    """With its file, and as the origin of what it lowered."""
    host.own_json.write_text('{"sandbox": {"ceilings": {"users": false}}}')
    settings = host.load(CLOCHE_USERS="true")
    rows = {key: (value, origin) for key, value, origin in settings.as_rows()}
    assert rows["ceilings.users"] == ("false", str(host.own_json))
    assert rows["users"] == ("false", f"ceiling in {host.own_json} (asked by environment CLOCHE_USERS)")
    assert host.load().origins["users"] == "default"


def test_images_by_language(host: Host) -> None:
    """An image for one language stands beside the others; an argument's image takes the place of all."""
    host.own_yaml.write_text("images: {python: 'a:1', go: 'b:1'}")
    settings = host.load(CLOCHE_IMAGE_PYTHON="c:2")
    assert (settings.image_for("python"), settings.image_for("go")) == ("c:2", "b:1")
    assert settings.origins["images.python"] == "environment CLOCHE_IMAGE_PYTHON"
    assert host.load({"image": "d:3"}).image_for("go") == "d:3"


def test_an_image_is_no_option(host: Host) -> None:
    """An image that a command line would read as an option is refused."""
    with pytest.raises(InvalidRequest, match="image: '--privileged' is not the name of an image"):
        host.load({"image": "--privileged"})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"memory": "lots"}, "memory: 'lots' is not a size"),
        ({"memory": 0}, "memory: 0 must be a number greater than 0"),
        ({"memory": True}, "memory: True"),
        ({"timeout": -1}, "timeout: -1"),
        ({"cpus": float("nan")}, "cpus: nan"),
        ({"pids": 1.5}, "pids: 1.5"),
        ({"network": "sideways"}, "network: 'sideways'"),
        ({"network": ["a b"]}, "network: 'a b' is empty or has blanks"),
        ({"screen": "maybe"}, "screen: 'maybe'"),
        ({"require": "fort"}, "require: unknown level or control 'fort'"),
        ({"require": 3}, "require: 3 is not a list"),
        ({"best_effort": "luck"}, "best_effort: unknown control 'luck'"),
        ({"packages": ["-r/etc/passwd"]}, "packages: '-r/etc/passwd'"),
        ({"level": "high"}, "level: unknown level 'high'"),
        ({"speed": 3}, "unknown argument 'speed'"),
    ],
)
def test_wrong_arguments_are_named(host: Host, arguments: dict[str, Any], named: str) -> None:
    """A wrong argument is refused by name and value."""
    with pytest.raises(InvalidRequest) as caught:
        host.load(arguments)
    assert named in str(caught.value)


def test_rows_show_everything(host: Host) -> None:
    """`as_rows` gives key, value and origin of each word as text."""
    host.own_yaml.write_text("ceilings: {memory: 1g}\nimages: {python: 'a:1'}")
    rows = {key: (value, origin) for key, value, origin in host.load({"memory": "64m", "tier": 3}).as_rows()}
    assert rows["memory"] == ("64MiB", "argument")
    assert rows["timeout"] == ("30s", "default")
    assert rows["require"] == ("jail", "tier 3")
    assert rows["ceilings.memory"] == ("1GiB", str(host.own_yaml))
    assert rows["images.python"] == ("a:1", str(host.own_yaml))
    assert all(isinstance(text, str) for row in rows.values() for text in row)


def test_yaml_is_imported_only_for_yaml(tmp_path: Path) -> None:
    """Without a YAML file the library for it is not loaded."""
    code = (
        "import sys; from pathlib import Path; from cloche.config.settings import load_settings; "
        "load_settings(environ={}, cwd=Path(sys.argv[1]), home=Path(sys.argv[1])); "
        "print('yaml' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_the_agents_folders_by_name(host: Host) -> None:
    """A variable wins over a file, each for itself; `none` takes one away; `~` is the home."""
    assert host.load().roots == {}
    host.own_yaml.write_text("roots: {/memory: ~/agent/memory, configs: /var/lib/agent/../configs}")
    settings = host.load(CLOCHE_ROOT_MEMORY="/var/lib/memory")
    assert settings.roots == {"memory": "/var/lib/memory", "configs": "/var/lib/configs"}
    assert settings.origins["roots.memory"] == "environment CLOCHE_ROOT_MEMORY"
    assert ("roots.configs", "/var/lib/configs", str(host.own_yaml)) in settings.as_rows()
    assert host.load(CLOCHE_ROOT_CONFIGS="none").roots == {"memory": str(Path("~/agent/memory").expanduser())}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "{memory: agent/memory}",
            r"roots\.memory: 'agent/memory' is not an absolute path; write one, such as ~/agent/memory",
        ),
        ("{secrets: /etc}", "unknown root 'secrets'; known roots: memory, configs"),
        ("/var/lib", "is not a mapping"),
        ("{memory: 7}", r"roots\.memory: 7 is not text"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_named(host: Host, text: str, complaint: str) -> None:
    """With what can be."""
    host.own_yaml.write_text(f"roots: {text}")
    with pytest.raises(InvalidRequest, match=complaint):
        host.load()
