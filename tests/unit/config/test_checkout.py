"""Files in the working directory come with a checkout nobody vetted: they may take away, never give."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cloche.config.keys import Settings
from cloche.config.settings import check_runnable, load_settings
from cloche.core.enforcement import Control, Level
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.limits import MIB
from cloche.core.secrets import Secret
from cloche.execution.secrets import read_with_settings


class Checkout:
    """A working directory beside a home of the test's own."""

    def __init__(self, root: Path) -> None:
        self.home, self.cwd = root / "home", root / "work"
        (self.home / ".config" / "cloche").mkdir(parents=True)
        self.cwd.mkdir()

    def owner(self, text: str) -> None:
        (self.home / ".config" / "cloche" / "config.yaml").write_text(text)

    def says(self, name: str, text: str) -> Path:
        (self.cwd / name).write_text(text)
        return self.cwd / name

    def load(self, arguments: Mapping[str, Any] | None = None, **environ: str) -> Settings:
        return load_settings(arguments, environ=environ, cwd=self.cwd, home=self.home)

    def refusal(self, arguments: Mapping[str, Any] | None = None, **environ: str) -> str:
        with pytest.raises(InvalidRequest) as caught:
            self.load(arguments, **environ)
        return str(caught.value)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """An empty checkout and an owner without files."""
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("memory: 1g", "memory"),
        ("sandbox: {memoryLimit: 1g}", "sandbox.memoryLimit"),
        ("sandbox: {cpu_limit: 2}", "sandbox.cpu_limit"),
        ("timeout: 31s", "timeout"),
        ("flood_bytes: 1g", "flood_bytes"),
        ("network: true", "network"),
        ("network: allowlist", "network"),
        ("network: [packages.example]", "network"),
        ("network: bridge", "network"),
        ("network_ports: [22]", "network_ports"),
        ("on_network: ask", "on_network"),
        ("NetworkEnabled: true", "NetworkEnabled"),
        ("tier: 4", "tier"),
        ("backend: none", "backend"),
        ("backend: subprocess", "backend"),
        ("backend: e2b", "backend"),
        ("backend: kubernetes", "backend"),
        ("backend: auto", "backend"),
        ("runtime: runc", "runtime"),
        ("packages: [numpy]", "packages"),
        ("packages: auto", "packages"),
        ("languages: [python, csharp]", "languages"),
        ("best_effort: [memory]", "best_effort"),
        ("image: 'evil:1'", "image"),
        ("images: {python: 'evil:1'}", "images"),
        ("ceilings: {memory: 1g}", "ceilings"),
        ("ceilings: {users: true}", "ceilings"),
        ("ceilings: {network: open}", "ceilings"),
        ("users: true", "users"),
        ("preset: standard", "preset"),
        ("preset: network-open", "preset"),
        ("audit_keep_age: 1d", "audit_keep_age"),
        ("audit_keep_size: 1m", "audit_keep_size"),
    ],
)
def test_a_loosening_key_is_refused_by_name(checkout: Checkout, text: str, key: str) -> None:
    """What asks for more than holds without the file is an error that names file and key."""
    path = checkout.says("cloche.yaml", text)
    message = checkout.refusal()
    assert message.startswith(f"{path}: {key} asks for ")
    assert "may only tighten" in message


@pytest.mark.parametrize(
    ("text", "word", "value"),
    [
        ("memory: 100m", "limits.memory_bytes", 100 * MIB),
        ("timeout: 5", "limits.timeout_s", 5.0),
        ("preset: minimal", "limits.memory_bytes", 128 * MIB),
        ("preset: minimal\nmemory: 64m", "limits.memory_bytes", 64 * MIB),
        ("preset: locked-down\ntimeout: 30", "policy.user", "nobody"),
        ("network: false", "policy.network", "off"),
        ("backend: docker", "backend", "docker"),
        ("backend: firecracker", "backend", "firecracker"),
        ("backend: local", "backend", "local"),
        ("tier: 3", "policy.require_level", Level.JAIL),
        ("tier: 3\nsandbox: {backend: gvisor}", "backend", "gvisor"),
        ("tier: 1\nsandbox: {backend: none}", "backend", "none"),
        ("require: [jail, memory]", "policy.require_controls", (Control.MEMORY,)),
        ("screen: block", "policy.screen", "block"),
        ("languages: [python]", "policy.languages", ("python",)),
        ("packages: none", "policy.packages", ()),
        ("network_deny: [evil.example]", "policy.network_deny", ("evil.example",)),
        ("on_network: refuse", "policy.on_network", "refuse"),
    ],
)
def test_a_tightening_key_holds(checkout: Checkout, text: str, word: str, value: object) -> None:
    """What asks for less, or for the same, is taken, and the origin says from where."""
    path = checkout.says("cloche.yaml", text)
    found: Any = checkout.load()
    assert any(str(path) in origin for origin in found.origins.values())
    for part in word.split("."):
        found = getattr(found, part)
    assert found == value


def test_what_an_owner_allows_is_the_measure(checkout: Checkout) -> None:
    """The file is compared with what the owner's files say, not with the defaults."""
    checkout.owner("sandbox: {memory: 1g, network: [a.example, b.example], packages: [numpy, pandas], screen: warn}")
    checkout.says("cloche.yaml", "sandbox: {memory: 512m, network: [a.example], packages: [numpy]}")
    settings = checkout.load()
    assert settings.limits.memory_bytes == 512 * MIB
    assert settings.policy.network_allow == ("a.example",)
    assert settings.policy.packages == ("numpy",)
    checkout.says("cloche.yaml", "sandbox: {screen: off}")
    assert "sandbox.screen asks for" in checkout.refusal()
    checkout.says("cloche.yaml", "sandbox: {network: [c.example]}")
    assert "sandbox.network asks for" in checkout.refusal()


@pytest.mark.parametrize(
    ("owner", "theirs", "policy"),
    [
        ("network: ['*.a.example']", "network: [b.a.example]", ("allowlist", ("b.a.example",))),
        ("network: ['*.a.example']", "network: [a.example]", None),
        ("network: [a.example]", "network: ['a.example:443']", ("allowlist", ("a.example:443",))),
        ("network: ['a.example:443']", "network: [a.example]", None),
        (
            "network: ['db:5432@10.0.0.0/8']",
            "network: ['db:5432@10.1.0.0/16']",
            ("allowlist", ("db:5432@10.1.0.0/16",)),
        ),
        ("network: ['db:5432@10.0.0.0/8']", "network: ['db:5432@192.168.0.0/16']", None),
        ("network: [db]", "network: ['db@10.0.0.0/8']", None),
        ("network: open", "network: [a.example]", ("allowlist", ("a.example",))),
        ("network: open", "network: ['a.example:22']", None),
        ("network: open\nnetwork_ports: 22", "network: ['a.example:22']", ("allowlist", ("a.example:22",))),
        ("network: open", "network: ['db@10.0.0.0/8']", None),
        ("network: open", "network: ['10.0.0.5']", None),
        ("network: open", "network: ['8.8.8.8']", ("allowlist", ("8.8.8.8",))),
        ("network: bridge", "network: ['10.0.0.5:22']", ("allowlist", ("10.0.0.5:22",))),
        ("network: bridge", "network: open", ("open", ())),
        ("network: open", "network: bridge", None),
        ("network: [a.example]", "network: true", ("allowlist", ("a.example",))),
        ("network: [a.example]", "network_allow: [b.example]", None),
        ("network: [a.example]", "network_allow: []", ("allowlist", ())),
        ("network: off\nnetwork_allow: [a.example]", "network: 'on'", None),
        ("network: [a.example]", "network: ['a.example/GET:/x']", ("allowlist", ("a.example/GET:/x",))),
        ("network: ['a.example/GET:/x/*']", "network: ['a.example/GET:/x/y']", ("allowlist", ("a.example/GET:/x/y",))),
        ("network: ['a.example/GET:/x/*']", "network: ['a.example/POST:/x/y']", None),
        ("network: ['a.example/GET:/x']", "network: [a.example]", None),
        ("network: open\nnetwork_allow: ['b.a.example/GET:/x']", "network: ['*.a.example']", None),
        ("network: open\nnetwork_allow: ['b.a.example/GET:/x']", "network: open\nnetwork_allow: []", None),
        ("network: open\nnetwork_allow: ['a.example/GET:/x']", "network: [c.example]", ("allowlist", ("c.example",))),
    ],
)
def test_a_checkouts_hosts_are_within_the_owners(
    checkout: Checkout, owner: str, theirs: str, policy: tuple[str, tuple[str, ...]] | None
) -> None:
    """They are compared by what they allow: host, ports, and addresses that are not public."""
    checkout.owner(owner)
    checkout.says("cloche.yaml", theirs)
    if policy is None:
        assert "may only tighten" in checkout.refusal()
    else:
        held = checkout.load().policy
        assert (held.network, held.network_allow) == policy


def test_hosts_of_two_checkout_files_are_those_of_both(checkout: Checkout) -> None:
    """Each of the two files tightens what the other one leaves."""
    checkout.owner("network: open")
    checkout.says("config.yaml", "sandbox: {network: ['*.a.example', b.example, c.example]}")
    checkout.says("cloche.yaml", "sandbox: {network: [x.a.example, b.example, d.example]}")
    assert checkout.load().policy.network_allow == ("b.example", "x.a.example")


def test_what_is_denied_joins(checkout: Checkout) -> None:
    """No source takes back what another one denies, and ports are those of the owner that the checkout leaves."""
    checkout.owner("network: open\nnetwork_deny: [a.example]\nnetwork_ports: [22, 8443]")
    checkout.says("cloche.yaml", "network_deny: ['203.0.113.0/24']\nnetwork_ports: [8443]")
    policy = checkout.load().policy
    assert (policy.network_deny, policy.network_ports) == (("a.example", "203.0.113.0/24"), (8443,))
    assert checkout.load({"network_deny": ["b.example"]}).policy.network_deny == (
        "a.example", "203.0.113.0/24", "b.example",
    )  # fmt: skip


def test_requirements_join(checkout: Checkout) -> None:
    """A checkout's requirement adds to the owner's and never lowers it."""
    checkout.owner("sandbox: {require: [vm, memory]}")
    checkout.says("cloche.yaml", "require: [process, cpu]")
    policy = checkout.load().policy
    assert policy.require_level is Level.VM
    assert set(policy.require_controls) == {Control.MEMORY, Control.CPU}


def test_arguments_still_decide(checkout: Checkout) -> None:
    """The caller's own word wins over the file, down and up."""
    checkout.says("cloche.yaml", "memory: 128m")
    assert checkout.load({"memory": "64m"}).limits.memory_bytes == 64 * MIB
    assert checkout.load({"memory": "1g"}).limits.memory_bytes == 1024 * MIB
    checkout.says("cloche.yaml", "memory: 512m")
    assert checkout.load({"memory": "1g"}).limits.memory_bytes == 1024 * MIB
    assert "memory asks for" in checkout.refusal({"memory": "64m"})


@pytest.mark.parametrize("said", ["off", "warn", "block"])
def test_a_checkout_takes_no_screen_from_a_child_process(checkout: Checkout, said: str) -> None:
    """The caller may, whose word that level is."""
    checkout.says("cloche.yaml", f"screen: {said!r}")
    assert checkout.load({"backend": "subprocess"}).policy.screen == "block"
    assert checkout.load({"backend": "subprocess", "screen": "off"}).policy.screen == "off"
    assert checkout.load().policy.screen == said
    if said != "block":
        checkout.owner("backend: subprocess")
        assert "screen asks for screen" in checkout.refusal()


def test_hosts_of_a_checkout_never_reach_a_network_of_the_caller(checkout: Checkout) -> None:
    """Hosts that a checkout lists while the network is off are not there when the caller turns it on."""
    checkout.says("cloche.yaml", "network_allow: [evil.example]")
    assert checkout.load({"network": "allowlist"}).policy.network_allow == ()
    assert checkout.load({"network": True}).policy.network == "open"


def test_none_of_a_checkout_never_means_the_host(checkout: Checkout) -> None:
    """Tier 1 in the file and tier 4 as an argument leave the owner's backend in place."""
    checkout.owner("backend: docker")
    checkout.says("cloche.yaml", "tier: 1\nbackend: none")
    assert checkout.load({"tier": 4}).backend == "docker"


def test_a_checkout_can_refuse_to_run(checkout: Checkout) -> None:
    """Tier 1 in a checkout stops the run; the caller's own tier goes over it."""
    checkout.says("config.yaml", "tier: 1")
    with pytest.raises(PolicyDenied, match=r"tier 1 \(.*config\.yaml\) runs no code"):
        check_runnable(checkout.load())
    check_runnable(checkout.load({"tier": 3}))


def test_config_yaml_of_another_program(checkout: Checkout) -> None:
    """A config.yaml without a tier or a section `sandbox` is somebody else's, and not even parsed."""
    checkout.says("config.yaml", "memory: 8g\nsecret: !vault abc\n%broken: [")
    assert set(checkout.load().origins.values()) == {"default"}
    checkout.says("config.yaml", "sandbox: true  # payments\nmemory: 8g\n")
    assert set(checkout.load().origins.values()) == {"default"}
    checkout.says("config.yaml", "memory: 8g\ndatabase: x\nsandbox: {memory: 64m}\n")
    assert checkout.load().limits.memory_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tier: gold\n", "'tier' seems to be another program's"),
        ("sandbox: {enabled: true, timeout: 9000}\n", "no key like 'enabled'"),
        ("sandbox: !vault x\nbackend: api\n", "the file seems to be another program's"),
        ("a: sandbox\n---\nb: 1\n", "the file seems to be another program's"),
        ("tier: 1 # " + "x" * (1 << 20), "it is ignored"),
        (b"tier: 1 # \xff", "it is ignored"),
    ],
)
def test_config_yaml_of_another_program_is_passed_over_with_a_warning(
    checkout: Checkout, text: str | bytes, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and what else is configured holds."""
    path = checkout.says("config.yaml", "")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert set(checkout.load().origins.values()) == set(checkout.load({"pids": None}).origins.values()) == {"default"}
    (warning,) = caplog.messages
    assert str(path) in warning
    assert told in warning


@pytest.mark.parametrize(
    "text",
    [
        "sandbox: {memroy: 64m}",
        "sandbox: {enabled: true, backend: gvisor}",
        "sandbox:\n  require: vm\n  x: !vault y",
        'sandbox: {"require": vm, x: !vault y}',
        "sandbox: {timeout: 9000}",
    ],
)
def test_a_mistake_in_what_is_cloches_is_no_other_programs(checkout: Checkout, text: str) -> None:
    """Nobody gets less isolation than a file asks for because something else in it is not understood."""
    checkout.says("config.yaml", text)
    assert "config.yaml" in checkout.refusal()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "sandbox: !x\n" + "\n" * 500_000,
        "sandbox:\n" + "".join(f"  {'memory_pids_network_backend' * 3}{number}: 1\n" for number in range(9999)),
    ],
)
def test_a_long_config_yaml_of_another_program_holds_nobody_up(checkout: Checkout, text: str) -> None:
    """A stranger has written it."""
    checkout.says("config.yaml", text)
    assert set(checkout.load().origins.values()) == {"default"}


def test_several_files_join_to_the_tightest(checkout: Checkout) -> None:
    """Of what several files say about one thing, the tightest holds."""
    checkout.says("config.yaml", "sandbox: {memory: 64m, timeout: 20s, languages: [python, go]}")
    checkout.says("cloche.yaml", "memory: 128m\ntimeout: 10s\nlanguages: [go, bash]")
    checkout.says(".env", "SANDBOX_TYPE=docker\nCLOCHE_PIDS=7\n")
    settings = checkout.load()
    assert (settings.limits.memory_bytes, settings.limits.timeout_s, settings.limits.pids) == (
        64 * MIB,
        10,
        7,
    )
    assert settings.policy.languages == ("go",)
    assert settings.backend == "docker"


def test_dotenv_chooses_a_stronger_backend(checkout: Checkout) -> None:
    """SANDBOX_TYPE in `.env` works where it tightens; the environment goes over it."""
    path = checkout.says(".env", "SANDBOX_TYPE=Docker\n")
    settings = checkout.load()
    assert (settings.backend, settings.origins["backend"]) == ("docker", str(path))
    assert checkout.load(SANDBOX_TYPE="gvisor").backend == "gvisor"
    checkout.says(".env", "SANDBOX_TYPE=subprocess\n")
    assert checkout.refusal().startswith(f"{path}: SANDBOX_TYPE asks for backend subprocess")


@pytest.mark.parametrize("backend", ["e2b", "daytona", "kubernetes", "none", "subprocess"])
def test_dotenv_chooses_any_backend_where_the_user_named_it(checkout: Checkout, backend: str) -> None:
    """What is merely found may only tighten, and the refusal says how to name it; naming one leaves others found."""
    path = checkout.says(".env", f"SANDBOX_TYPE={backend}\nCLOCHE_TIER=4\nCLOCHE_MEMORY=1g\n")
    refusal = checkout.refusal()
    assert refusal.startswith(f"{path}: ")
    assert "found in the working directory may only tighten" in refusal
    assert "name it with --env-file (CLOCHE_ENV_FILE) if it is yours" in refusal
    settings = checkout.load(CLOCHE_ENV_FILE=".env")
    check_runnable(settings)
    assert (settings.backend, settings.origins["backend"]) == (backend, str(path))
    assert settings.limits.memory_bytes == 1024 * MIB
    other = path.rename(checkout.cwd / "mine.env")
    checkout.says(".env", "SANDBOX_TYPE=ray\n")
    assert "SANDBOX_TYPE asks for backend ray" in checkout.refusal(CLOCHE_ENV_FILE=str(other))


def test_a_named_dotenv_ranks_below_the_environment_and_above_files(checkout: Checkout) -> None:
    """And the operator's ceilings cap it; its time-out wins over arguments, as the environment's does."""
    checkout.owner("sandbox: {memory: 64m, pids: 9, ceilings: {cpus: 2}}")
    checkout.says("mine.env", "CLOCHE_MEMORY=1g\nCLOCHE_PIDS=20\nCLOCHE_CPUS=8\nSANDBOX_TIMEOUT_SEC=90\nOTHER='x y\n")
    found = checkout.load({"timeout": 5}, CLOCHE_ENV_FILE="mine.env", CLOCHE_PIDS="30").limits
    assert (found.memory_bytes, found.pids, found.cpus, found.timeout_s) == (1024 * MIB, 30, 2.0, 90.0)
    checkout.says("mine.env", "CLOCHE_MEMORY=2g")
    assert checkout.load(CLOCHE_ENV_FILE="mine.env").limits.memory_bytes == 2048 * MIB  # a change is seen
    assert "(CLOCHE_ENV_FILE): there is no file" in checkout.refusal(CLOCHE_ENV_FILE="missing.env")
    assert "is not a regular file" in checkout.refusal(CLOCHE_ENV_FILE=".")


def test_dotenv_timeout_only_shortens(checkout: Checkout) -> None:
    """SANDBOX_TIMEOUT_SEC in `.env` caps even an argument, and lengthens nothing."""
    checkout.says(".env", "SANDBOX_TIMEOUT_SEC=20")
    assert checkout.load({"timeout": 60}).limits.timeout_s == 20
    assert checkout.load({"timeout": 10}).limits.timeout_s == 10
    assert checkout.load(SANDBOX_TIMEOUT_SEC="100").limits.timeout_s == 100
    checkout.says(".env", "SANDBOX_TIMEOUT_SEC=3600")
    assert "SANDBOX_TIMEOUT_SEC asks for" in checkout.refusal()


@pytest.mark.parametrize(
    ("line", "pids"),
    [
        ("CLOCHE_PIDS=5", 5),
        ("export CLOCHE_PIDS = '5'", 5),
        ('CLOCHE_PIDS="5" # few', 5),
        ("CLOCHE_PIDS=5 # few", 5),
        ("# CLOCHE_PIDS=5", 64),
        ("CLOCHE_PIDS=", 64),
        ("DATABASE_URL='it''s\nPIDS=3\nMY_CLOCHE_PIDS=4\nCLOCHE_OTHER=(", 64),
    ],
)
def test_lines_of_dotenv(checkout: Checkout, line: str, pids: int) -> None:
    """Only Cloche's own lines of a `.env` are read; the others may be anything."""
    checkout.says(".env", line)
    assert checkout.load().limits.pids == pids


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("CLOCHE_PIDS='5", "line 1: CLOCHE_PIDS: the value is not one word"),
        ("CLOCHE_PIDS=5\nCLOCHE_PIDS=6", "line 2: CLOCHE_PIDS is given twice"),
        ("\nCLOCHE_CONFIG=/tmp/mine.yaml", "line 2: CLOCHE_CONFIG cannot be set here"),
        ("CLOCHE_ENV_FILE=other.env", "line 1: CLOCHE_ENV_FILE cannot be set here"),
        ("SANDBOX_TYPE=dokcer", "SANDBOX_TYPE: unknown backend 'dokcer'"),
    ],
)
def test_wrong_lines_of_dotenv(checkout: Checkout, text: str, named: str) -> None:
    """A wrong line is refused with file, line and key."""
    path = checkout.says(".env", text)
    message = checkout.refusal()
    assert message.startswith(str(path))
    assert named in message


def test_a_virtual_environment_called_dotenv(checkout: Checkout) -> None:
    """A folder named .env is not a lock file of this user."""
    (checkout.cwd / ".env").mkdir()
    assert checkout.load().backend == "local"


def test_a_named_file_is_the_owners(checkout: Checkout) -> None:
    """A file of the working directory that the caller names is theirs, and may loosen."""
    path = checkout.says("cloche.yaml", "memory: 1g")
    assert checkout.load({"config": path}).limits.memory_bytes == 1024 * MIB
    assert checkout.load(CLOCHE_CONFIG="cloche.yaml").limits.memory_bytes == 1024 * MIB


@pytest.mark.parametrize("text", ["roots: {memory: /var/lib/other}", "sandbox: {roots: {/configs: /etc}}"])
def test_a_checkout_names_no_folder_of_the_host(checkout: Checkout, text: str) -> None:
    """Whatever its owner keeps there; the refusal names key and file."""
    checkout.owner("roots: {memory: /var/lib/agent}")
    path = checkout.says("cloche.yaml", text)
    refusal = checkout.refusal()
    assert refusal.startswith(f"{path}: ")
    assert "roots asks for roots." in refusal
    assert "may only tighten" in refusal


def test_a_checkout_may_take_a_folder_away(checkout: Checkout) -> None:
    """Or name the one that holds."""
    checkout.owner("roots: {memory: /var/lib/agent, configs: /var/lib/Configs}")
    checkout.says("cloche.yaml", "roots: {memory: none, configs: /var/lib/Configs}")
    assert checkout.load().roots == {"configs": "/var/lib/Configs"}
    checkout.says(".env", "CLOCHE_ROOT_CONFIGS=/var/lib/elsewhere")
    assert "asks for roots.configs /var/lib/elsewhere; without it /var/lib/Configs holds" in checkout.refusal()


def test_a_checkout_has_a_secret_open_no_more_than_its_owner_does(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list without the rules about a host's methods and paths is shorter, and that host's secret would open it."""
    rules = ("a.example/GET:/x/*", "a.example/POST:/y")
    checkout.owner(f"network_allow: [{rules[0]}, {rules[1]}, b.example]")
    monkeypatch.chdir(checkout.cwd)
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(checkout.home / ".config" if "XDG" in name else checkout.home))
    secrets = {"KEY": Secret(value="0123456789abcdef", hosts=["a.example", "c.example"])}
    for text, listed in (
        ("network_allow: [b.example]", ("b.example", *rules)),
        ("network_allow: []", rules),
        (f"network_allow: [{rules[1]}]", rules[1:]),
    ):
        checkout.says("cloche.yaml", text)
        _, settings = read_with_settings({"secrets": secrets})
        assert settings.policy.network_allow == (*listed, "c.example:443")
