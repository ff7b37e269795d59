"""Every configuration key: one row with its spellings, reader, default, rule for looser values, field of the settings,
and display.

Theory of operation: a source (a file, the environment, the arguments) becomes a `Layer`: key -> `ConfiguredValue`. Some
spellings set several keys at once (`require` is a level and controls), so reading a spelling returns a mapping. Within
one source, two spellings may set the same key only to the same value. Everything else about the keys is derived from
`KEYS`, from the fields of `Settings` (types and defaults), and from the keywords of `SandboxOptions` (arguments).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

from cloche.core.errors import InvalidRequest
from cloche.core.fleet_settings import FleetSettings
from cloche.core.languages import LANGUAGES
from cloche.core.limits import (
    LIMITS,
    LimitRow,
    Limits,
    format_size,
    parse_count,
    parse_cpu_percent,
    parse_cpus,
    parse_duration,
    parse_memory,
)
from cloche.core.policy import Fallback, OnNetwork, Policy, ScreenMode, parse_backend, parse_tier
from cloche.core.record import dataclass, field

from . import readers
from .autofix_settings import AutoFixSettings
from .options import Prefer, SandboxOptions
from .origins import DEFAULT, ConfiguredValue, Layer, Origin, with_value
from .readers import ANY_LANGUAGE, Parser, Reader, Values

AUTO = "auto"
# Variable names that the providers define, by key; other keys get names of the form CLOCHE_PROVIDER_KEY.
REMOTE_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "e2b": {
        "api_key": "E2B_API_KEY", "url": "E2B_API_URL", "domain": "E2B_DOMAIN", "sandbox_url": "E2B_SANDBOX_URL",
    },
    "daytona": {
        "api_key": "DAYTONA_API_KEY", "url": "DAYTONA_API_URL", "organisation": "DAYTONA_ORGANIZATION_ID",
        "region": "DAYTONA_TARGET",
    },
    "cloche": {
        "api_key": "CLOCHE_REMOTE_KEY", "url": "CLOCHE_REMOTE_URL", "ca_file": "CLOCHE_REMOTE_CA_FILE",
        "certificate": "CLOCHE_REMOTE_CERTIFICATE", "lifetime": "CLOCHE_REMOTE_LIFETIME",
        "silence": "CLOCHE_REMOTE_SILENCE", "lease": "CLOCHE_REMOTE_LEASE",
        "runs_per_day": "CLOCHE_REMOTE_RUNS_PER_DAY",
        "seconds_per_day": "CLOCHE_REMOTE_SECONDS_PER_DAY", "sandboxes_per_day": "CLOCHE_REMOTE_SANDBOXES_PER_DAY",
        "sandboxes_at_once": "CLOCHE_REMOTE_SANDBOXES_AT_ONCE", "money_per_day": "CLOCHE_REMOTE_MONEY_PER_DAY",
    },
}  # fmt: skip
_USER = re.compile(r"//[^/]*@")  # user and password of a URL; the user of the address refuses them


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The resolved configuration.

    `ceilings` is keyed by the fields of `Limits` and by `users`, `network` (a `NetworkCeiling`), `packages` and `level`
    of the policy, `images` by language (`*` is any other), `roots` by `memory` and `configs` if they have a host
    folder, `remotes` by provider and field of `RemoteAccount` or `Quota` ("e2b/api_key"). `skill_path` names folders
    with skills, besides the platform's. With `audit` None, the front end decides. `origins` maps every key, as spelled
    in files, to the source of its value: "default", "tier 3", "preset minimal (argument)", a file's path, "environment
    SANDBOX_TYPE" or "argument".
    """

    backend: str = "local"
    prefer: Prefer = "strongest"
    tier: int | None = None
    preset: str | None = None
    limits: Limits = field(default_factory=Limits)
    policy: Policy = field(default_factory=Policy)
    autofix: AutoFixSettings = field(default_factory=AutoFixSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    ceilings: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    audit: bool | None = None
    audit_folder: str | None = None
    audit_keep: tuple[str, ...] = ()
    audit_keep_age_s: float | None = None
    audit_keep_bytes: int | None = None
    approvals_two_people: bool = False
    skill_path: tuple[str, ...] = ()
    secrets_from: str = ""
    secrets_key: str = ""
    toolchains: tuple[str, ...] = ()
    agents: Mapping[str, Any] = field(default_factory=dict)
    images_allow: tuple[str, ...] = ()
    packages_allow: tuple[str, ...] = ()
    packages_deny: tuple[str, ...] = ()
    packages_min_age_s: float = 0.0
    packages_hosts: tuple[str, ...] = ()
    packages_build: tuple[str, ...] = ()
    packages_keep_bytes: int | None = None
    packages_keep_count: int | None = None
    packages_lock: str = ""
    roots: Mapping[str, str] = field(default_factory=dict)
    remotes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def image_for(self, language: str) -> str | None:
        """Return the image configured for `language`; None means the default of the language table."""
        return self.images.get(language, self.images.get(ANY_LANGUAGE))

    def as_rows(self) -> list[tuple[str, str, str]]:
        """Return key, value and origin of every setting as text, for `cloche config show`."""
        texts_by_label: dict[str, list[str]] = {}
        empty_texts: dict[str, str] = {}
        for key in KEYS:
            value = key.value_in(self) if key.settings_field and key.is_listed else ABSENT
            if value is not ABSENT:
                texts = [key.render(value, self)] if value not in (None, "", ()) else []
                texts_by_label.setdefault(key.label, []).extend(texts)
                empty_texts[key.label] = key.text_if_empty
        rows = {label: ", ".join(texts) or empty_texts[label] for label, texts in texts_by_label.items()}
        names = {where: name for name, where in CEILING_FIELDS.items()}
        ceilings = {names[where]: ceiling for where, ceiling in self.ceilings.items()}
        rows |= {
            f"ceilings.{name}": BY_NAME[name].render(ceiling, self) or "none" for name, ceiling in ceilings.items()
        }
        return [(label, text, self.origins.get(label, DEFAULT)) for label, text in rows.items()]


ABSENT = object()


def _render_value(value: Any, _: Settings) -> str:  # noqa: ANN401  # as many types as there are keys
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Key:
    """One configuration key.

    - `name`: its spelling in files, and in arguments if `SandboxOptions` has that keyword. After a dot it is the key of
      a section, as in `autofix.model`. `aliases` are further spellings in files, `variable` is its environment
      variable.
    - `parse` returns its value; `read`, instead, the values of several keys. With neither, only other keys set it.
      `json` reads it in JSON. `other_spellings` have their own readers, because their values have another meaning (a
      percentage, for example). `is_in_files` is false for a key that no file may set.
    - `settings_field`: the field of `Settings` that it sets, such as `limits.pids`. The field has the default, unless
      `default` is given. Empty for a key that only sets other keys.
    - `is_looser(new, old)`: whether the new value would give an untrusted file more. None refuses every value there.
      `join(first, second)` combines the values of two such files; without it, the tighter one is used. With `is_added`,
      a value is joined with the current one instead of replacing it.
    - `has_ceiling`: the owner's `ceilings` may limit it, by the order of its values. If its values have no order,
      `parse_ceiling` reads the ceiling, and `join_ceilings` returns the lower of two (`resolve` compares).
    - `listed_as`: its key in `cloche config show`, if not the name; keys with the same one share a line. `render`
      formats a value there; `text_if_empty` stands for None, empty text and an empty list.
    """

    name: str
    aliases: tuple[str, ...] = ()
    variable: str = ""
    parse: Parser | None = None
    read: Reader | None = None
    json: Reader | None = None
    other_spellings: Mapping[str, Reader] = field(default_factory=dict)
    is_in_files: bool = True
    settings_field: str = ""
    default: Any = ABSENT
    is_looser: Callable[[Any, Any], bool] | None = None
    join: Callable[[ConfiguredValue, ConfiguredValue], ConfiguredValue] | None = None
    is_added: bool = False
    has_ceiling: bool = False
    parse_ceiling: Parser | None = None
    join_ceilings: Callable[[Any, Any], Any] = min
    listed_as: str = ""
    is_listed: bool = True
    render: Callable[[Any, Settings], str] = _render_value
    text_if_empty: str = "none"

    @property
    def label(self) -> str:
        return self.listed_as or self.name

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def reader(self) -> Reader | None:
        parse, name = self.parse, self.name
        return self.read if parse is None else lambda value, **named: {name: parse(value, **named)}

    def readers(self, *, is_json: bool = False) -> dict[str, Reader]:
        """Return the reader of each spelling in files."""
        if self.reader is None or not self.is_in_files:
            return {}
        own = self.json if is_json and self.json is not None else self.reader
        return {self.name.rpartition(".")[2]: own, **dict.fromkeys(self.aliases, self.reader), **self.other_spellings}

    def value_in(self, settings: Settings) -> Any:  # noqa: ANN401  # as many types as there are keys
        """Return the value in these settings; ABSENT if a mapping lacks the key."""
        section, _, name = self.settings_field.rpartition(".")
        holder = getattr(settings, section) if section else settings
        return holder.get(name, ABSENT) if isinstance(holder, Mapping) else getattr(holder, name)


def _is_never_looser(_new: object, _old: object) -> bool:
    return False


def _is_wider(new: Iterable[object], old: Iterable[object]) -> bool:
    return not set(new) <= set(old)


def _is_different(new: object, old: object) -> bool:
    return new != old


def _is_before(*values: object) -> Callable[[object, object], bool]:
    """Return the rule for values listed from the loosest to the tightest."""
    return lambda new, old: values.index(new) < values.index(old)


def _in_both(first: ConfiguredValue, second: ConfiguredValue) -> ConfiguredValue:
    """Intersect two lists; `auto` stands for a list of unknown content, so the other one is used."""
    if AUTO in (first.value, second.value):
        return first if second.value == AUTO else second
    return with_value(second, tuple(item for item in first.value if item in second.value))


def _in_either(first: ConfiguredValue, second: ConfiguredValue) -> ConfiguredValue:
    return with_value(second, tuple(dict.fromkeys((*first.value, *second.value))))


def _highest(first: ConfiguredValue, second: ConfiguredValue) -> ConfiguredValue:
    return second if first.value is None or second.value > first.value else first


def _amount(name: str, parse: Parser, **more: Any) -> Reader:  # noqa: ANN401 - arguments of the parser
    return lambda value, **named: {name: parse(value, **named, **more)}


# Additional spellings of some limits.
_OTHER_FORMS: Mapping[str, Mapping[str, Any]] = {
    # C8: a bare `timeout` is in milliseconds in JSON, and only there.
    "timeout": {"json": _amount("timeout", parse_duration, bare_unit_s=0.001)},
    "cpus": {"other_spellings": {"CpuLimitPercent": _amount("cpus", parse_cpu_percent)}},
}


def _limit(row: LimitRow) -> Key:
    name, where = row.keyword, row.field
    return Key(
        name=name, aliases=(*row.aliases, *((where,) if where != name else ())), parse=row.parse, variable=row.variable,
        settings_field=f"limits.{where}", has_ceiling=True, is_looser=operator.gt,
        render=lambda amount, _: format_limit(name, amount), **_OTHER_FORMS.get(name, {}),
    )  # fmt: skip


def _image(language: str) -> Key:
    variable = "" if language == ANY_LANGUAGE else f"CLOCHE_IMAGE_{language.upper()}"
    return Key(
        name=f"image.{language}", variable=variable, parse=readers.parse_image, settings_field=f"images.{language}",
        is_looser=_is_different, listed_as=f"images.{language}",
    )  # fmt: skip


def _root(name: str) -> Key:
    return Key(
        name=f"roots.{name}", variable=f"CLOCHE_ROOT_{name.upper()}", parse=partial(readers.parse_root, root=name),
        settings_field=f"roots.{name}", is_looser=lambda new, old: bool(new) and new != old,
    )  # fmt: skip


def _autofix(name: str, parse: Parser, where: str = "", **more: Any) -> Key:  # noqa: ANN401 - fields of Key
    return Key(
        name=f"autofix.{name}", variable=f"CLOCHE_AUTOFIX_{name.upper()}", parse=parse,
        settings_field=f"autofix.{where or name}", **more,
    )  # fmt: skip


def _fleet(name: str, parse: Parser, where: str = "", **more: Any) -> Key:  # noqa: ANN401 - fields of Key
    """Return a key of the fleet. A file in the working directory cannot set it."""
    return Key(
        name=f"fleet.{name}", variable=f"CLOCHE_FLEET_{name.upper()}", parse=parse,
        settings_field=f"fleet.{where or name}", **more,
    )  # fmt: skip


def _remotes() -> Iterator[Key]:
    """Yield the keys of each remote provider. A file in the working directory cannot set them."""
    seconds: dict[str, Any] = {"parse": parse_duration, "render": _seconds}
    address: dict[str, Any] = {"parse": readers.parse_line, "render": _render_address}
    for provider, variables in REMOTE_VARIABLES.items():
        yield _section(provider)
        fields: dict[str, dict[str, Any]] = {
            "api_key": {"parse": readers.parse_secret, "render": lambda _key, _: "set (hidden)"},
            "url": address,
            **({"domain": {"parse": readers.parse_line}} if provider == "e2b" else {}),
            **({"sandbox_url": address} if provider == "e2b" else {}),
            **({name: {"parse": readers.parse_line} for name in ("organisation", "region") if provider == "daytona"}),
            **({"template": {"parse": readers.parse_line}} if provider != "cloche" else {}),
            "ca_file": {"parse": readers.parse_file},
            **({"certificate": {"parse": readers.parse_sha256}} if provider == "cloche" else {}),
            "lifetime": seconds,
            "silence": seconds,
            **({"lease": {"parse": readers.parse_least_age, "render": _seconds}} if provider == "cloche" else {}),
            "runs_per_day": {"parse": parse_count},
            "seconds_per_day": seconds,
            "sandboxes_per_day": {"parse": parse_count},
            "sandboxes_at_once": {"parse": parse_count},
            "money_per_day": {"parse": readers.parse_money},
        }  # fmt: skip
        for name, more in fields.items():
            where = f"{name}_s" if name in ("lifetime", "silence", "lease") else name
            yield Key(
                name=f"{provider}.{name}", variable=variables.get(name, f"CLOCHE_{provider.upper()}_{name.upper()}"),
                settings_field=f"remotes.{provider}/{where}", **more,
            )  # fmt: skip


def _section(section: str) -> Key:
    return Key(
        name=section, read=lambda value, *, name: readers.read_section(value, name=name, readers=SECTIONS[section])
    )


def _read_ceilings(value: object, name: str, by_name: Mapping[str, Reader]) -> Values:
    readers_by_spelling = {
        spelling: by_name[spelling] for limit in CEILING_FIELDS for spelling in BY_NAME[limit].readers()
    }
    for limit in CEILING_FIELDS:
        if (parse := BY_NAME[limit].parse_ceiling) is not None:
            readers_by_spelling[limit] = _amount(limit, parse)
    return readers.read_ceilings(value, name=name, readers=readers_by_spelling, limits=CEILING_FIELDS)


def format_limit(limit: str, value: float) -> str:
    """Format a limit as a user would write it: `256MiB`, `30s`, `0.5`."""
    if LIMIT_FIELDS[limit].endswith("_bytes"):
        return format_size(int(value))
    return f"{value:g}s" if limit == "timeout" else f"{value:g}"


def _render_address(url: str, _: Settings) -> str:
    return _USER.sub("//(hidden)@", url)


def _seconds(value: float, _: Settings) -> str:
    return f"{value:g}s"


# In the order in which `cloche config show` lists them.
KEYS: tuple[Key, ...] = (
    # The rule for looser backends is in `resolve`, since it depends on the tier.
    Key(name="backend", variable="SANDBOX_TYPE", parse=parse_backend, settings_field="backend"),
    Key(
        name="prefer", variable="CLOCHE_PREFER", parse=readers.one_of(get_args(Prefer)), settings_field="prefer",
        is_looser=lambda new, old: new == "fastest" != old,
    ),
    # No tier (None) ranks between 4 (the host) and 3 (a jail or stronger).
    Key(
        name="tier", variable="CLOCHE_TIER", parse=parse_tier,
        settings_field="tier", is_looser=_is_before(4, None, 3, 2, 1),
    ),
    # The keys that a preset sets are compared one by one.
    Key(
        name="preset", variable="CLOCHE_PRESET", parse=readers.parse_preset, settings_field="preset",
        is_looser=_is_never_looser,
    ),
    # Only the owner chooses the log's folder and what is stored beside it.
    Key(
        name="audit", variable="CLOCHE_AUDIT", read=readers.read_audit, settings_field="audit",
        text_if_empty="on in the command line",
        is_looser=lambda new, old: not new and old is not False,
        render=lambda is_on, held: held.audit_folder or "on" if is_on else "off",
    ),
    Key(name="audit_folder", settings_field="audit_folder", is_listed=False),
    Key(name="audit_keep", variable="CLOCHE_AUDIT_KEEP", parse=readers.parse_audit_keep, settings_field="audit_keep"),
    Key(
        name="audit_keep_age", variable="CLOCHE_AUDIT_KEEP_AGE", parse=readers.parse_age,
        settings_field="audit_keep_age_s",
        default=30 * 24 * 3600.0, render=_seconds,
    ),
    Key(
        name="audit_keep_size", variable="CLOCHE_AUDIT_KEEP_SIZE", parse=readers.parse_total,
        settings_field="audit_keep_bytes",
        default=1 << 30, render=lambda size, _: format_size(size),
    ),
    Key(name="skill_path", parse=readers.parse_list, settings_field="skill_path"),
    *(Key(name=name, variable=f"CLOCHE_{name.upper()}", parse=readers.parse_file, settings_field=name)
      for name in ("secrets_from", "secrets_key")),
    *map(_limit, LIMITS),
    Key(name="timeout_override", variable="SANDBOX_TIMEOUT_SEC", parse=parse_duration, is_in_files=False),
    # Mode and hosts are compared together in `resolve`, since both determine what can be reached.
    Key(
        name="network", aliases=("NetworkEnabled",), variable="CLOCHE_NETWORK", read=readers.read_network,
        settings_field="policy.network", has_ceiling=True, parse_ceiling=readers.parse_network_ceiling,
        join_ceilings=lambda first, second: first.joined(second),
    ),
    Key(
        name="network_allow", aliases=("NetworkAllowList",), parse=readers.parse_hosts,
        settings_field="policy.network_allow",
    ),
    # A file of the working directory can only add denied hosts.
    Key(
        name="network_deny", parse=readers.parse_denied_hosts, settings_field="policy.network_deny",
        is_looser=_is_never_looser, join=_in_either, is_added=True,
    ),
    Key(
        name="network_ports", parse=readers.parse_network_ports, settings_field="policy.network_ports",
        is_looser=_is_wider, join=_in_both,
    ),
    Key(
        name="on_network", parse=readers.one_of(get_args(OnNetwork)), settings_field="policy.on_network",
        is_looser=_is_before("ask", "refuse"),
    ),
    Key(name="require", variable="CLOCHE_REQUIRE", read=readers.read_require),
    Key(
        name="require_level", settings_field="policy.require_level", listed_as="require",
        is_looser=_is_never_looser, join=_highest, is_added=True,
    ),
    Key(
        name="require_controls", settings_field="policy.require_controls", listed_as="require",
        is_looser=_is_never_looser, join=_in_either, is_added=True,
    ),
    Key(
        name="best_effort", parse=readers.parse_controls, settings_field="policy.best_effort",
        is_looser=_is_wider, join=_in_both,
    ),
    Key(
        name="accept_claimed", variable="CLOCHE_ACCEPT_CLAIMED", parse=readers.parse_switch,
        settings_field="policy.accept_claimed", is_looser=lambda new, old: new and not old,
    ),
    Key(
        name="fallback", variable="CLOCHE_FALLBACK", parse=readers.one_of(get_args(Fallback), if_false="none"),
        settings_field="policy.fallback", is_looser=lambda new, old: new != "none" and new != old,
    ),
    Key(name="trusted", parse=readers.parse_trusted, is_in_files=False, settings_field="policy.trusted"),
    Key(
        name="screen", variable="CLOCHE_SCREEN", parse=readers.one_of(get_args(ScreenMode), if_false="off"),
        settings_field="policy.screen", is_looser=_is_before("off", "warn", "block"),
    ),
    Key(
        name="packages", aliases=("PythonPackages",), parse=readers.parse_packages, settings_field="policy.packages",
        is_looser=lambda new, old: new != old and new != () and (old == AUTO or _is_wider(new, old)), join=_in_both,
        has_ceiling=True, parse_ceiling=readers.parse_package_ceiling, join_ceilings=readers.packages_in_both,
    ),
    # Only the owner allows packages and images; any source may deny more packages.
    Key(name="images_allow", parse=readers.parse_images_allow, settings_field="images_allow"),
    Key(
        name="packages_allow", parse=readers.parse_package_patterns, settings_field="packages_allow",
        text_if_empty="any",
    ),
    Key(
        name="packages_deny", parse=readers.parse_package_patterns, settings_field="packages_deny",
        is_looser=lambda new, old: not set(old) <= set(new), join=_in_either,
    ),
    Key(
        name="packages_min_age", parse=readers.parse_least_age, settings_field="packages_min_age_s", render=_seconds,
        is_looser=operator.lt,
    ),
    Key(name="packages_hosts", parse=readers.parse_package_hosts, settings_field="packages_hosts"),
    Key(name="packages_build", parse=readers.parse_package_patterns, settings_field="packages_build"),
    Key(
        name="packages_keep_size", parse=readers.parse_total, settings_field="packages_keep_bytes",
        default=10 << 30, render=lambda size, _: format_size(size),
    ),
    Key(name="packages_keep_count", parse=readers.parse_total_count, settings_field="packages_keep_count", default=200),
    Key(
        name="package_managers", variable="CLOCHE_PACKAGE_MANAGERS", parse=readers.parse_package_managers,
        settings_field="policy.package_managers", is_looser=_is_before(True, "live", False),
    ),
    Key(name="agents", parse=readers.parse_agents, settings_field="agents", render=lambda rows, _: ", ".join(rows)),
    # Only the owner chooses which host folders are shown.
    Key(
        name="toolchains", variable="CLOCHE_TOOLCHAINS", parse=readers.parse_toolchains,
        settings_field="toolchains",
    ),
    Key(name="locked", parse=readers.parse_lock_file, is_in_files=False, settings_field="packages_lock"),
    Key(
        name="languages", parse=readers.parse_languages,
        settings_field="policy.languages", is_looser=_is_wider, join=_in_both,
    ),
    # Sharing less between runs is tighter.
    Key(
        name="warm", variable="CLOCHE_WARM", parse=readers.parse_switch, settings_field="policy.warm",
        is_looser=lambda new, old: new and not old,
    ),
    Key(name="preload", variable="CLOCHE_PRELOAD", parse=readers.parse_modules, settings_field="policy.preload",
        is_looser=_is_wider, join=_in_both),
    Key(name="user", settings_field="policy.user", text_if_empty="unprivileged",
        is_looser=lambda new, old: old is not None and new != old),
    Key(name="users", variable="CLOCHE_USERS", parse=readers.parse_switch, settings_field="policy.users",
        is_looser=lambda new, old: new and not old, has_ceiling=True),
    Key(name="account", parse=readers.parse_account, settings_field="policy.account", text_if_empty="sandbox",
        is_looser=lambda _new, _old: False),
    Key(name="seccomp", settings_field="policy.seccomp", is_looser=lambda new, old: old and not new, is_listed=False),
    Key(
        name="level", parse=readers.parse_level, is_in_files=False,
        settings_field="policy.level", text_if_empty="strongest",
        has_ceiling=True, parse_ceiling=readers.parse_level, join_ceilings=max,
    ),
    # Docker's own runtime excludes gVisor.
    Key(name="runtime", read=readers.read_runtime,
        settings_field="policy.runtime", text_if_empty="any", is_looser=_is_different),
    _section("autofix"),
    _autofix("base_url", readers.parse_line, render=_render_address),
    _autofix("model", readers.parse_line),
    _autofix("api_key", readers.parse_secret, render=lambda _key, _: "set (hidden)"),
    _autofix("max_rounds", readers.parse_rounds, aliases=("maxRounds",), is_looser=operator.gt),
    _autofix("token_budget", parse_count, is_looser=operator.gt),
    _autofix("time_budget", parse_duration, "time_budget_s", is_looser=operator.gt, render=_seconds),
    _section("approvals"),
    Key(name="approvals.two_people", variable="CLOCHE_APPROVALS_TWO_PEOPLE", parse=readers.parse_switch,
        settings_field="approvals_two_people", is_looser=lambda new, old: old and not new),
    *_remotes(),
    _section("fleet"),
    _fleet("address", readers.parse_line, render=_render_address),
    _fleet("share", readers.parse_share),
    _fleet("ttl", parse_duration, "ttl_s", render=_seconds),
    _fleet("idle", parse_duration, "idle_s", render=_seconds),
    _fleet("quota", readers.parse_total_count),
    _fleet("wait", parse_duration, "wait_s", render=_seconds),
    _fleet("port", readers.parse_port),
    _fleet("scaling", parse_duration, "scaling_s", render=_seconds),
    _fleet("sandboxes", parse_count),
    *(_fleet(name, readers.parse_object_name) for name in ("namespace", "template", "runtime_class", "secret")),
    _fleet("mode", readers.one_of(("warm", "pod", "agent-sandbox"))),
    _fleet("isolation", readers.one_of(("pod", "jail"))),
    _fleet("pod_age", parse_duration, "pod_age_s", render=_seconds),
    _fleet("lease_age", parse_duration, "lease_age_s", render=_seconds),
    _fleet("image", readers.parse_image),
    _fleet("pods", parse_count),
    _fleet("pod_cpus", parse_cpus),
    _fleet("pod_memory", parse_memory, "pod_memory_bytes", render=lambda value, _: format_size(value)),
    *(_fleet(name, readers.parse_switch) for name in ("reserve_cpu", "network", "do_not_disrupt", "cordons")),
    _fleet("reach", readers.one_of(("auto", "address", "forward"))),
    Key(name="image", read=lambda value, *, name: {f"image.{ANY_LANGUAGE}": readers.parse_image(value, name=name)}),
    Key(name="images", read=readers.read_images),
    *map(_image, (ANY_LANGUAGE, *LANGUAGES)),
    Key(name="roots", read=lambda value, *, name: readers.read_roots(value, name=name, readers=SECTIONS["roots"])),
    *map(_root, ("memory", "configs")),
    Key(
        name="ceilings",
        read=lambda value, *, name: _read_ceilings(value, name, YAML_READERS),
        json=lambda value, *, name: _read_ceilings(value, name, JSON_READERS),
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Key] = {key.name: key for key in KEYS}
# The key of each limit, with its field in `Limits`.
LIMIT_FIELDS: Mapping[str, str] = {row.keyword: row.field for row in LIMITS}

# Keys that may have a ceiling, with their fields: every limit; `users`, with false as the lower value; `level`, with
# the higher level as the lower value; network and packages.
CEILING_FIELDS: Mapping[str, str] = {key.name: key.settings_field.rpartition(".")[2] for key in KEYS if key.has_ceiling}


def _file_readers(*, is_json: bool) -> dict[str, dict[str, Reader]]:
    """Return the readers of each section's spellings; the section "" is the file itself."""
    sections: dict[str, dict[str, Reader]] = {}
    for key in KEYS:
        sections.setdefault(key.section, {}).update(key.readers(is_json=is_json))
    return sections


SECTIONS: Mapping[str, Mapping[str, Reader]] = _file_readers(is_json=False)
YAML_READERS: Mapping[str, Reader] = SECTIONS[""]
JSON_READERS: Mapping[str, Reader] = _file_readers(is_json=True)[""]
VARIABLE_READERS: Mapping[str, Reader] = {
    key.variable: key.reader for key in KEYS if key.variable and key.reader is not None
}
ARGUMENT_READERS: Mapping[str, Reader] = {
    name: reader
    for name in SandboxOptions.__annotations__
    if name not in ("config", "secrets") and (reader := BY_NAME[name].reader) is not None
}


def _defaults() -> Layer:
    """Return the default of each key: that of its row, or of its field of the settings."""
    plain = Settings()
    values = {
        key.name: key.value_in(plain) if key.default is ABSENT else key.default for key in KEYS if key.settings_field
    }
    return {name: ConfiguredValue(value=v, origin=DEFAULT, key=name) for name, v in values.items() if v is not ABSENT}


DEFAULTS: Layer = MappingProxyType(_defaults())


def read_layer(
    pairs: Iterable[tuple[str, object]], reader_of: Mapping[str, Reader], *, origin: Origin, where: str
) -> Layer:
    """Return the layer of these pairs of key and value; `where` precedes keys in messages.

    A key may be dotted (`sandbox.memory`): its last part is the spelling. A value of None is skipped. Raises
    InvalidRequest naming the key, or both keys if two of them disagree.
    """
    layer: dict[str, ConfiguredValue] = {}
    for key, value in pairs:
        if value is None:
            continue
        name = f"{where}{key}"
        values = reader_of[key.rpartition(".")[2]](readers.check_length(value, name=name), name=name)
        for known_key, read in values.items():
            earlier = layer.get(known_key)
            if earlier is not None and earlier.value != read:
                raise InvalidRequest(f"{where}{earlier.key} and {key} set the same value differently; keep one of them")
            layer[known_key] = ConfiguredValue(value=read, origin=origin, key=key)
    return with_auto_backend(_with_host_list(layer, where=where), where=where)


def _with_host_list(layer: dict[str, ConfiguredValue], *, where: str) -> Layer:
    """Turn `on` into `allowlist` if the same source lists hosts.

    Raises InvalidRequest for `bridge` with a list, and for `open` with a host that it reaches anyway: a list of hosts
    contradicts access to all of them.
    """
    network, hosts = layer.get("network"), layer.get("network_allow")
    if network is None or hosts is None or network.value in {"off", "allowlist"}:
        return layer
    ports = layer["network_ports"].value if "network_ports" in layer else ()
    if network.value == "bridge" or (network.value == "open" and readers.is_in_open(hosts.value, ports)):
        raise InvalidRequest(
            f"{where}{network.key} is {network.value} but {hosts.key} lists hosts; use allowlist, or drop the list"
        )
    if network.value == "open":
        return layer
    return {**layer, "network": ConfiguredValue(value="allowlist", origin=network.origin, key=network.key)}


def with_auto_backend(layer: Layer, *, where: str) -> Layer:
    """Let `prefer` select the backend `auto`. Raises InvalidRequest if the source names another backend."""
    prefer, backend = layer.get("prefer"), layer.get("backend")
    if prefer is None:
        return layer
    if backend is not None and backend.value != AUTO:
        raise InvalidRequest(
            f"{where}{prefer.key} is for a choice among backends but {backend.key} names {backend.value}; "
            f"drop one of them, or let {backend.key} be {AUTO}"
        )
    return {**layer, "backend": backend or ConfiguredValue(value=AUTO, origin=prefer.origin, key=prefer.key)}
