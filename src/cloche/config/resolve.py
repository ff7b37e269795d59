"""Precedence of sources for each configuration key: presets, tiers, ceilings, and files that may only tighten.

Theory of operation: every source becomes a layer, a mapping from keys to `ConfiguredValue`. Layers are applied in
order, and the last one wins: defaults < tier < the owner's files < the working directory's files < values stored by a
service < the `.env` that the user named < environment < arguments. A preset has the rank of the source that chose it,
and only the highest source's preset counts. SANDBOX_TIMEOUT_SEC then replaces the time-out, and the owner's ceilings
limit everything. `resolve_settings` reads the sources; all other functions are pure.

A file of the working directory may have come with a checkout: it may ask for less, never for more. `tightened` compares
each such file with the result without these files: `base` is defaults, tier and the owner's files, `full` also includes
the environment and the arguments. A key that is looser than both is an error that names it. A key that is looser only
than `base` is ignored, because the environment or an argument decides it. All others tighten; of several files, the
tightest value is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from cloche.core.enforcement import Level, NetworkMode
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.policy import BACKEND_ROWS, check_backend, preset_named, tier_numbered

from .keys import AUTO, BY_NAME, CEILING_FIELDS, DEFAULTS, LIMIT_FIELDS, format_limit
from .origins import DEFAULT, ConfiguredValue, Layer, Origin, with_value
from .readers import ANY_LANGUAGE
from .sources import (
    ConfigPaths,
    argument_layer,
    checkout_layers,
    env_file_layer,
    operator_layers,
    stored_layer,
    variable_layer,
)

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

_KEYS_OF_LIMITS = {field: name for name, field in LIMIT_FIELDS.items()}
_NETWORKS = get_args(NetworkMode)
_BACKEND_STRENGTH: Mapping[str, int] = {
    name: row.strength for name, row in BACKEND_ROWS.items() if row.strength is not None
}
_AUTO_STRENGTH = 4  # `auto` may choose anything up to a virtual machine
_NOTHING: Layer = MappingProxyType({})
_PAIR = ("network", "network_allow")
NetworkPair = tuple[NetworkMode, tuple[str, ...]]


def expand_preset(layer: Layer) -> Layer:
    """Return the layer with the values of its preset added; the layer's own keys take precedence."""
    configured = layer.get("preset")
    if configured is None:
        return layer
    preset = preset_named(configured.value)
    origin = Origin.preset(preset.name, configured.origin)
    values = {_KEYS_OF_LIMITS[field]: value for field, value in preset.limits.items()} | dict(preset.policy)
    return {
        **{name: ConfiguredValue(value=v, origin=origin, key=configured.key) for name, v in values.items()},
        **layer,
    }


def tightened(layers: Sequence[Layer], base: Layer, full: Layer) -> Layer:
    """Return one layer with everything that `layers` tighten. Raises InvalidRequest naming file and key of a looser
    value.
    """
    merged: dict[str, ConfiguredValue] = {}
    for layer in layers:
        for name, configured in _accepted(layer, base, full).items():
            merged[name] = _tighter(name, merged[name], configured) if name in merged else configured
    return merged


def _accepted(layer: Layer, base: Layer, full: Layer) -> dict[str, ConfiguredValue]:
    accepted: dict[str, ConfiguredValue] = {}
    for name, configured in _with_network_pair(expand_preset(layer), base).items():
        if name == "backend" and configured.value == "none" and "tier" in layer and layer["tier"].value in (1, 2):
            continue  # these tiers imply it
        if not _loosens(name, configured, base):
            accepted[name] = _joined_with_required(name, configured, base)
        elif _loosens(name, configured, full):
            raise _refusal(name, configured, full)
    return accepted


def _with_network_pair(layer: Layer, base: Layer) -> Layer:
    """Replace mode and hosts by one key, `network_pair`, since only both together determine the reachable hosts."""
    named = layer.get("network") or layer.get("network_allow")
    if named is None:
        return layer
    pair = ConfiguredValue(value=_network_pair({**base, **layer}), origin=named.origin, key=named.key)
    return {
        **{w: configured for w, configured in layer.items() if w not in _PAIR},
        "network_pair": pair,
    }


def _network_pair(layer: Layer) -> NetworkPair:
    return effective_network(layer), layer["network_allow"].value


def effective_network(layer: Layer) -> NetworkMode:
    """Return the mode; `on` means `allowlist` if any source gave a list of hosts, otherwise `open`."""
    mode: Any = layer["network"].value
    if mode != "on":
        return mode  # type: ignore[no-any-return]  # one of the modes
    return "open" if layer["network_allow"].origin == DEFAULT else "allowlist"


def _loosens(name: str, configured: ConfiguredValue, resolved: Layer) -> bool:
    """Tell whether a value is looser than the current one; a key without a rule always is."""
    together = _JOINT_RULES.get(name)
    if together is not None:
        return together(configured.value, resolved)
    key = BY_NAME.get(name)
    old = resolved[name].value if name in resolved else None
    return key is None or key.is_looser is None or bool(key.is_looser(configured.value, old))


def _backend_loosens(new: str, resolved: Layer) -> bool:
    old, tier = resolved["backend"].value, resolved["tier"].value
    if new == old:
        return False
    if new == "none" or new not in _BACKEND_STRENGTH or (old == "none" and tier != 4):
        return True  # `none` outside of tier 4 runs nothing, so every other backend is looser
    strength = _AUTO_STRENGTH if old == "auto" else _BACKEND_STRENGTH.get(old)
    return strength is None or _BACKEND_STRENGTH[new] <= strength


def _network_loosens(new: NetworkPair, resolved: Layer) -> bool:
    """Tell whether a mode reaches more, or one of the hosts was not reachable before."""
    old = _network_pair(resolved)
    if new[0] == "off" or new == old:
        return False
    if _NETWORKS.index(new[0]) > _NETWORKS.index(old[0]):
        return True
    from cloche.core.ceilings import covers  # imported only if such a file configures the network

    reachable = _rules_of(old, resolved)
    if new[0] == "open" and not {rule.text for rule in reachable.limited} <= set(new[1]):
        return True  # a host whose requests were limited would be reached as others are
    return not all(covers(reachable, rule) for rule in _rules_of(new).allow)


def _rules_of(pair: NetworkPair, resolved: Layer = _NOTHING) -> NetworkRules:
    from cloche.core.network import NetworkRules

    ports = resolved["network_ports"].value if "network_ports" in resolved else ()
    return NetworkRules.parse(mode=pair[0], allow=pair[1], ports=ports)


# Rules of keys that depend on another key.
_JOINT_RULES: Mapping[str, Callable[[Any, Layer], bool]] = {
    "backend": _backend_loosens,
    "network_pair": _network_loosens,
    "timeout_override": lambda new, resolved: bool(new > resolved["timeout"].value),
}


def _joined_with_required(name: str, configured: ConfiguredValue, base: Layer) -> ConfiguredValue:
    """Return the value, joined with the current one if the key `is_added`."""
    key = BY_NAME.get(name)
    return key.join(base[name], configured) if key is not None and key.is_added and key.join is not None else configured


def _tighter(name: str, first: ConfiguredValue, second: ConfiguredValue) -> ConfiguredValue:
    if name == "network_pair":
        return with_value(second, _narrower(first.value, second.value))
    if name == "backend":
        return max(first, second, key=lambda configured: _BACKEND_STRENGTH.get(configured.value, -1))
    if name == "timeout_override":
        return min(first, second, key=lambda configured: configured.value)
    key = BY_NAME[name]
    if key.join is not None:
        return key.join(first, second)
    return second if key.is_looser is not None and key.is_looser(first.value, second.value) else first


def _narrower(first: NetworkPair, second: NetworkPair) -> NetworkPair:
    if first[0] != second[0]:
        return min(first, second, key=lambda pair: _NETWORKS.index(pair[0]))
    from cloche.core.ceilings import allowed_by_both

    return first[0], allowed_by_both(_rules_of(first), _rules_of(second))


def _refusal(name: str, configured: ConfiguredValue, full: Layer) -> InvalidRequest:
    shown = {"network_pair": "network", "timeout_override": "timeout"}.get(name, name)
    value = configured.value[0] if name == "network_pair" else configured.value
    resolved = full.get(shown)
    without = f"; without it {_render(shown, resolved.value)} holds ({resolved.origin})" if resolved is not None else ""
    file = configured.origin.first
    option = "--env-file (CLOCHE_ENV_FILE)" if file.endswith(".env") else "--config (CLOCHE_CONFIG)"
    return InvalidRequest(
        f"{file}: {configured.key} asks for {shown} {_render(shown, value)}{without}. "
        f"A file that is found in the working directory may only tighten; name it with {option} if it is "
        "yours, or set it in your own configuration file, in the environment or as an argument"
    )


def _render(name: str, value: object) -> str:
    if name in LIMIT_FIELDS and isinstance(value, int | float):
        return format_limit(name, value)
    if isinstance(value, str):
        return value or "none"
    if isinstance(value, bool | None):
        return str(value).lower()
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def resolve_settings(
    arguments: Mapping[str, Any], config_paths: ConfigPaths
) -> tuple[Layer, Mapping[str, ConfiguredValue]]:
    """Return each key's value, and the ceilings by key. Raises InvalidRequest naming source and key."""
    files = operator_layers(config_paths)
    above = (
        stored_layer(),
        env_file_layer(config_paths),
        variable_layer(config_paths.environ),
        argument_layer(arguments),
    )
    resolved = _resolve(files, above)
    checkout = checkout_layers(config_paths)
    if checkout:
        resolved = _resolve(files, above, between=tightened(checkout, _resolve(files, ()), resolved))
    ceilings = _lowest_ceilings(files)
    _cap(resolved, ceilings)
    _choose_for_level(resolved)
    _check_tier(resolved)
    return resolved, ceilings


def _resolve(
    files: Sequence[Layer], above: Sequence[Layer], *, between: Layer = _NOTHING
) -> dict[str, ConfiguredValue]:
    """Apply all layers, lowest rank first; `between` ranks just above the files."""
    chosen = next((layer for layer in reversed([*files, *above]) if "preset" in layer), None)
    resolved = dict(DEFAULTS)
    tier = next((layer["tier"] for layer in reversed([*files, between, *above]) if "tier" in layer), None)
    resolved.update(_tier_layer(tier))
    upper = [expand_preset(layer) if layer is chosen else layer for layer in above]
    for layer in files:
        _apply(resolved, expand_preset(layer) if layer is chosen else layer)
    _apply(resolved, _split_network_pair(between, upper))
    for layer in upper:
        _apply(resolved, layer)
    _override_timeout(resolved, between)
    _screen_process(resolved, between)
    return resolved


def _tier_layer(tier: ConfiguredValue | None) -> Layer:
    if tier is None:
        return _NOTHING
    facts = tier_numbered(tier.value)
    values: dict[str, Any] = {"backend": facts.backends[0]}
    if facts.least_level is not Level.NONE:
        values["require_level"] = facts.least_level
    values = {w: ConfiguredValue(value=v, origin=Origin.tier(facts.number), key="tier") for w, v in values.items()}
    return {"tier": tier, **values}


def _apply(resolved: dict[str, ConfiguredValue], layer: Layer) -> None:
    """Let a layer's keys replace the current values. An image for any language replaces every image of lower layers.

    A backend other than docker resets `runtime`, which is docker's. Denied hosts accumulate, so that denying one more
    host never allows another one.
    """
    if f"image.{ANY_LANGUAGE}" in layer:
        for name in [name for name in resolved if name.startswith("image.")]:
            del resolved[name]
    if "backend" in layer and layer["backend"].value != "docker":
        resolved["runtime"] = DEFAULTS["runtime"]
    before = resolved["network_deny"]
    resolved.update(layer)
    if "network_deny" in layer and before.value:
        denied, origins = layer["network_deny"], (before.origin, layer["network_deny"].origin)
        both = tuple(dict.fromkeys((*before.value, *denied.value)))
        resolved["network_deny"] = ConfiguredValue(value=both, origin=Origin.joined(origins), key=denied.key)


def _split_network_pair(between: Layer, upper: Sequence[Layer]) -> Layer:
    """Split `network_pair` of the untrusted files into two keys, or drop it if a higher source sets the network."""
    accepted = {
        name: configured for name, configured in between.items() if name not in ("network_pair", "timeout_override")
    }
    pair = between.get("network_pair")
    if pair is None or any("network" in layer or "network_allow" in layer for layer in upper):
        return accepted
    for name, value in zip(_PAIR, pair.value, strict=True):
        accepted[name] = ConfiguredValue(value=value, origin=pair.origin, key=pair.key)
    return accepted


def _override_timeout(resolved: dict[str, ConfiguredValue], between: Layer) -> None:
    """Let SANDBOX_TIMEOUT_SEC override every time-out; in an untrusted file it can only lower it."""
    override, cap = resolved.get("timeout_override"), between.get("timeout_override")
    if override is not None:
        resolved["timeout"] = override
    elif cap is not None and cap.value < resolved["timeout"].value:
        resolved["timeout"] = cap


def _screen_process(resolved: dict[str, ConfiguredValue], between: Layer) -> None:
    """Set the strict screen for level process, unless the caller or the owner chose one (R2b)."""
    is_said = resolved["screen"].origin != DEFAULT and resolved["screen"] is not between.get("screen")
    by = "backend" if resolved["backend"].value == "subprocess" else "level"
    if not is_said and (by == "backend" or resolved["level"].value is Level.PROCESS):
        resolved["screen"] = ConfiguredValue(value="block", origin=resolved[by].origin, key=resolved[by].key)


def _lowest_ceilings(files: Sequence[Layer]) -> dict[str, ConfiguredValue]:
    # A later file cannot raise a ceiling.
    lowest: dict[str, ConfiguredValue] = {}
    for layer in files:
        for name in CEILING_FIELDS:
            configured = layer.get(f"ceiling.{name}")
            if configured is not None:
                lowest[name] = _lower(name, lowest[name], configured) if name in lowest else configured
    return lowest


def _lower(name: str, first: ConfiguredValue, second: ConfiguredValue) -> ConfiguredValue:
    joined = BY_NAME[name].join_ceilings(first.value, second.value)
    if joined in (first.value, second.value):
        return first if joined == first.value else second
    return ConfiguredValue(value=joined, origin=Origin.joined((first.origin, second.origin)), key=first.key)


def _cap(resolved: dict[str, ConfiguredValue], ceilings: Mapping[str, ConfiguredValue]) -> None:
    """Lower values that exceed their ceiling. Raises PolicyDenied for network and packages, which cannot be lowered
    silently.
    """
    for name, ceiling in ceilings.items():
        if name in _CEILING_RULES:
            _CEILING_RULES[name](resolved, ceiling)
        elif resolved[name].value > ceiling.value:
            origin = Origin.ceiling(ceiling.origin, resolved[name].origin)
            resolved[name] = ConfiguredValue(value=ceiling.value, origin=origin, key=ceiling.key)


def _check_network_ceiling(resolved: dict[str, ConfiguredValue], ceiling: ConfiguredValue) -> None:
    pair = _network_pair(resolved)
    above = "" if pair[0] == "off" else ceiling.value.excess(_rules_of(pair, resolved))
    if above:
        raise _above("network", above, resolved["network" if above == pair[0] else "network_allow"], ceiling)


def _check_package_ceiling(resolved: dict[str, ConfiguredValue], ceiling: ConfiguredValue) -> None:
    packages = resolved["packages"]
    if not packages.value:
        return
    from cloche.core.ceilings import packages_above

    if above := packages_above(packages.value, ceiling.value):
        raise _above("packages", above, packages, ceiling)


def _above(name: str, excess: str, configured: ConfiguredValue, ceiling: ConfiguredValue) -> PolicyDenied:
    return PolicyDenied(
        f"{configured.key}: {excess} ({configured.origin}) is above the ceiling in {ceiling.origin}"
        f" (ceilings.{name}: {_render(name, ceiling.value)}); ask for less, or have the operator raise it"
    )


def _require_level(resolved: dict[str, ConfiguredValue], minimum: ConfiguredValue) -> None:
    """Turn the ceiling of the level into a required level, since a weaker level gives a program more."""
    required = resolved["require_level"]
    if required.value is None or required.value < minimum.value:
        origin = Origin.ceiling(minimum.origin, resolved["level"].origin)
        resolved["require_level"] = ConfiguredValue(value=minimum.value, origin=origin, key=minimum.key)


_CEILING_RULES: Mapping[str, Callable[[dict[str, ConfiguredValue], ConfiguredValue], None]] = {
    "network": _check_network_ceiling,
    "packages": _check_package_ceiling,
    "level": _require_level,
}


def _choose_for_level(resolved: dict[str, ConfiguredValue]) -> None:
    """Choose `auto` for a level above that of the default backend, if no source named a backend."""
    backend = resolved["backend"]
    if backend.value != "local" or backend.origin.kind not in ("default", "tier"):
        return
    for name in ("level", "require_level"):
        configured = resolved[name]
        if configured.value is not None and configured.value > Level.JAIL:
            resolved["backend"] = ConfiguredValue(value=AUTO, origin=configured.origin, key=configured.key)


def _check_tier(resolved: dict[str, ConfiguredValue]) -> None:
    """Refuse a backend outside the tier's list, and raise the required level to the tier's."""
    tier, backend = resolved["tier"], resolved["backend"]
    if tier.value is None:
        return
    facts = tier_numbered(tier.value)
    check_backend(facts, backend.value, tier_origin=tier.origin, backend_origin=backend.origin)
    required = resolved["require_level"].value
    if facts.least_level is not Level.NONE and (required is None or required < facts.least_level):
        resolved["require_level"] = ConfiguredValue(
            value=facts.least_level, origin=Origin.tier(facts.number), key="tier"
        )
