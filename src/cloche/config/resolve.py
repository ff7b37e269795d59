"""Which source wins for each configuration key: presets, tiers, ceilings, and files that may only tighten.

Theory of operation: every source becomes a layer, a mapping from keys to wishes, and layers are laid over one another,
so the last one wins: defaults < tier < the owner's files < the working directory's files < the `.env` that the user
named < environment < arguments. A preset is laid at the rank of the source that chose it, and only the highest source's
preset counts. SANDBOX_TIMEOUT_SEC then replaces the time-out, and the owner's ceilings cap everything. `sources` does
the reading, which `settle` asks for; all else is pure.

A file of the working directory may have come with a checkout: it may ask for less, never for more. `tightened` is given
what each such file says, what holds at the rank of files without them (`base`), and what holds in the end without them
(`full`, with the environment and the arguments). A key that asks for more than both is refused by name; one that asks
for more than `base` only is without effect, as the environment or an argument decides it; what is left can only tighten
and is taken, the tightest of several files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cloche.core.enforcement import Level
from cloche.core.errors import InvalidRequest
from cloche.core.policy import BACKEND_ROWS, check_backend, preset_named, tier_numbered

from .keys import AUTO, BY_NAME, DEFAULT, DEFAULTS, LIMIT_FIELDS, Layer, Origin, Wish, shown_limit, with_value
from .readers import ANY_LANGUAGE
from .sources import Places, argument_layer, checkout_layers, env_file_layer, operator_layers, variable_layer

_FIELD_WORDS = {field: word for word, field in LIMIT_FIELDS.items()}
_NETWORKS = ("off", "allowlist", "open")
_BACKEND_STRENGTH: Mapping[str, int] = {
    name: row.strength for name, row in BACKEND_ROWS.items() if row.strength is not None
}
_AUTO_STRENGTH = 4  # it may already be anything up to a virtual machine
_NOTHING: Layer = MappingProxyType({})


def expand_preset(layer: Layer) -> Layer:
    """Return the layer with what its preset stands for; the layer's own keys win."""
    wish = layer.get("preset")
    if wish is None:
        return layer
    preset = preset_named(wish.value)
    origin = Origin.preset(preset.name, wish.origin)
    words = {_FIELD_WORDS[field]: value for field, value in preset.limits.items()} | dict(preset.policy)
    return {**{word: Wish(value=v, origin=origin, key=wish.key) for word, v in words.items()}, **layer}


def tightened(layers: Sequence[Layer], base: Layer, full: Layer) -> Layer:
    """Return one layer that holds what `layers` tighten. Raises InvalidRequest naming file and key of what loosens."""
    merged: dict[str, Wish] = {}
    for layer in layers:
        for word, wish in _judged(layer, base, full).items():
            merged[word] = _tighter(word, merged[word], wish) if word in merged else wish
    return merged


def _judged(layer: Layer, base: Layer, full: Layer) -> dict[str, Wish]:
    kept: dict[str, Wish] = {}
    for word, wish in _with_network_pair(expand_preset(layer), base).items():
        if word == "backend" and wish.value == "none" and "tier" in layer and layer["tier"].value in (1, 2):
            continue  # these tiers mean it anyway
        if not _loosens(word, wish, base):
            kept[word] = _met(word, wish, base)
        elif _loosens(word, wish, full):
            raise _refusal(word, wish, full)
    return kept


def _with_network_pair(layer: Layer, base: Layer) -> Layer:
    """Make mode and hosts one key, as neither says alone what can be reached."""
    named = layer.get("network") or layer.get("network_allow")
    if named is None:
        return layer
    pair = Wish(value=_reach({**base, **layer}), origin=named.origin, key=named.key)
    return {**{w: wish for w, wish in layer.items() if w not in ("network", "network_allow")}, "reach": pair}


def _reach(layer: Layer) -> tuple[str, tuple[str, ...]]:
    return effective_network(layer), layer["network_allow"].value


def effective_network(layer: Layer) -> str:
    """Return the mode; a network that is merely `on` is the list of hosts where any source gave one."""
    mode: str = layer["network"].value
    if mode != "on":
        return mode
    return "open" if layer["network_allow"].origin == DEFAULT else "allowlist"


def _loosens(word: str, wish: Wish, held: Layer) -> bool:
    """Tell whether a wish asks for more than is held; what has no rule, and what is no key by itself, does."""
    together = _TOGETHER.get(word)
    if together is not None:
        return together(wish.value, held)
    key = BY_NAME.get(word)
    old = held[word].value if word in held else None
    return key is None or key.is_looser is None or bool(key.is_looser(wish.value, old))


def _backend_loosens(new: str, held: Layer) -> bool:
    old, tier = held["backend"].value, held["tier"].value
    if new == old:
        return False
    if new == "none" or new not in _BACKEND_STRENGTH or (old == "none" and tier != 4):
        return True  # `none` outside tier 4 runs nothing, which is the least there is
    strength = _AUTO_STRENGTH if old == "auto" else _BACKEND_STRENGTH.get(old)
    return strength is None or _BACKEND_STRENGTH[new] <= strength


def _reach_loosens(new: tuple[str, tuple[str, ...]], old: tuple[str, tuple[str, ...]]) -> bool:
    (mode, hosts), (old_mode, old_hosts) = new, old
    if mode == "allowlist" and old_mode == "allowlist":
        return not set(hosts) <= set(old_hosts)
    return _NETWORKS.index(mode) > _NETWORKS.index(old_mode)


# What is judged beside another key.
_TOGETHER: Mapping[str, Callable[[Any, Layer], bool]] = {
    "backend": _backend_loosens,
    "reach": lambda new, held: _reach_loosens(new, _reach(held)),
    "timeout_override": lambda new, held: bool(new > held["timeout"].value),
}


def _met(word: str, wish: Wish, base: Layer) -> Wish:
    """Return the wish joined with what is required already; any other accepted wish is tight as it is."""
    key = BY_NAME.get(word)
    return key.join(base[word], wish) if key is not None and key.is_added and key.join is not None else wish


def _tighter(word: str, one: Wish, other: Wish) -> Wish:
    """Return what two accepted wishes come to together."""
    if word == "reach":
        return with_value(other, _narrower(one.value, other.value))
    if word == "backend":
        return max(one, other, key=lambda wish: _BACKEND_STRENGTH.get(wish.value, -1))
    if word == "timeout_override":
        return min(one, other, key=lambda wish: wish.value)
    key = BY_NAME[word]
    if key.join is not None:
        return key.join(one, other)
    return other if key.is_looser is not None and key.is_looser(one.value, other.value) else one


def _narrower(one: tuple[str, tuple[str, ...]], other: tuple[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    if one[0] == other[0] == "allowlist":
        return "allowlist", tuple(host for host in one[1] if host in other[1])
    return min(one, other, key=lambda reach: _NETWORKS.index(reach[0]))


def _refusal(word: str, wish: Wish, full: Layer) -> InvalidRequest:
    shown = {"reach": "network", "timeout_override": "timeout"}.get(word, word)
    value = wish.value[0] if word == "reach" else wish.value
    held = full.get(shown)
    without = f"; without it {_text(shown, held.value)} holds ({held.origin})" if held is not None else ""
    file = wish.origin.first
    option = "--env-file (CLOCHE_ENV_FILE)" if file.endswith(".env") else "--config (CLOCHE_CONFIG)"
    return InvalidRequest(
        f"{file}: {wish.key} asks for {shown} {_text(shown, value)}{without}. "
        f"A file that was merely found in the working directory may only tighten; name it with {option} if it is "
        "yours, or say it in your own configuration file, in the environment or as an argument"
    )


def _text(word: str, value: object) -> str:
    if word in LIMIT_FIELDS and isinstance(value, int | float):
        return shown_limit(word, value)
    if isinstance(value, str):
        return value or "none"
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value).lower()


def settle(arguments: Mapping[str, Any], places: Places) -> tuple[Layer, Mapping[str, Wish]]:
    """Return what holds, and the ceilings by the limit's key. Raises InvalidRequest naming source and key."""
    files = operator_layers(places)
    above = (env_file_layer(places), variable_layer(places.environ), argument_layer(arguments))
    held = _resolve(files, above)
    strangers = checkout_layers(places)
    if strangers:
        held = _resolve(files, above, between=tightened(strangers, _resolve(files, ()), held))
    ceilings = _lowest_ceilings(files)
    _cap(held, ceilings)
    _choose_for_level(held)
    _check_tier(held)
    return held, ceilings


def _resolve(files: Sequence[Layer], above: Sequence[Layer], *, between: Layer = _NOTHING) -> dict[str, Wish]:
    """Lay all layers over one another, lowest rank first; `between` ranks just above the files."""
    chosen = next((layer for layer in reversed([*files, *above]) if "preset" in layer), None)
    held = dict(DEFAULTS)
    tier = next((layer["tier"] for layer in reversed([*files, between, *above]) if "tier" in layer), None)
    held.update(_tier_layer(tier))
    upper = [expand_preset(layer) if layer is chosen else layer for layer in above]
    for layer in files:
        _lay(held, expand_preset(layer) if layer is chosen else layer)
    _lay(held, _without_reach(between, upper))
    for layer in upper:
        _lay(held, layer)
    _override_timeout(held, between)
    _screen_process(held, between)
    return held


def _tier_layer(tier: Wish | None) -> Layer:
    if tier is None:
        return _NOTHING
    facts = tier_numbered(tier.value)
    values: dict[str, Any] = {"backend": facts.backends[0]}
    if facts.least_level is not Level.NONE:
        values["require_level"] = facts.least_level
    words = {w: Wish(value=v, origin=Origin.tier(facts.number), key="tier") for w, v in values.items()}
    return {"tier": tier, **words}


def _lay(held: dict[str, Wish], layer: Layer) -> None:
    """Let a layer's keys win; an image for any language takes the place of every image chosen below it.

    Whoever names another backend than docker has no use for the runtime that a weaker source demanded of docker.
    """
    if f"image.{ANY_LANGUAGE}" in layer:
        for word in [word for word in held if word.startswith("image.")]:
            del held[word]
    if "backend" in layer and layer["backend"].value != "docker":
        held["runtime"] = DEFAULTS["runtime"]
    held.update(layer)


def _without_reach(between: Layer, upper: Sequence[Layer]) -> Layer:
    """Turn an unvetted file's pair of mode and hosts into two keys, unless a higher source decides the network."""
    kept = {word: wish for word, wish in between.items() if word not in ("reach", "timeout_override")}
    pair = between.get("reach")
    if pair is None or any("network" in layer or "network_allow" in layer for layer in upper):
        return kept
    for word, value in zip(("network", "network_allow"), pair.value, strict=True):
        kept[word] = Wish(value=value, origin=pair.origin, key=pair.key)
    return kept


def _override_timeout(held: dict[str, Wish], between: Layer) -> None:
    """Let SANDBOX_TIMEOUT_SEC win over everything; an unvetted file's wins only downwards."""
    override, cap = held.get("timeout_override"), between.get("timeout_override")
    if override is not None:
        held["timeout"] = override
    elif cap is not None and cap.value < held["timeout"].value:
        held["timeout"] = cap


def _screen_process(held: dict[str, Wish], between: Layer) -> None:
    """Let level process have the strict screen, unless the caller or the owner said which one (R2b)."""
    is_said = held["screen"].origin != DEFAULT and held["screen"] is not between.get("screen")
    by = "backend" if held["backend"].value == "subprocess" else "level"
    if not is_said and (by == "backend" or held["level"].value is Level.PROCESS):
        held["screen"] = Wish(value="block", origin=held[by].origin, key=held[by].key)


def _lowest_ceilings(files: Sequence[Layer]) -> dict[str, Wish]:
    """Return the lowest ceiling of each limit; a ceiling does not yield to a later file."""
    lowest: dict[str, Wish] = {}
    for layer in files:
        for word in LIMIT_FIELDS:
            wish = layer.get(f"ceiling.{word}")
            if wish is not None and (word not in lowest or wish.value < lowest[word].value):
                lowest[word] = wish
    return lowest


def _cap(held: dict[str, Wish], ceilings: Mapping[str, Wish]) -> None:
    for word, most in ceilings.items():
        if held[word].value > most.value:
            origin = Origin.ceiling(most.origin, held[word].origin)
            held[word] = Wish(value=most.value, origin=origin, key=most.key)


def _choose_for_level(held: dict[str, Wish]) -> None:
    """Let `auto` look for a level that the default backend never has, where nobody named another one."""
    backend = held["backend"]
    if backend.value != "local" or backend.origin.kind not in ("default", "tier"):
        return
    for word in ("level", "require_level"):
        wish = held[word]
        if wish.value is not None and wish.value > Level.JAIL:
            held["backend"] = Wish(value=AUTO, origin=wish.origin, key=wish.key)


def _check_tier(held: dict[str, Wish]) -> None:
    """Refuse a backend outside the tier's list, and let nothing require less than the tier does."""
    tier, backend = held["tier"], held["backend"]
    if tier.value is None:
        return
    facts = tier_numbered(tier.value)
    check_backend(facts, backend.value, tier_origin=tier.origin, backend_origin=backend.origin)
    required = held["require_level"].value
    if facts.least_level is not Level.NONE and (required is None or required < facts.least_level):
        held["require_level"] = Wish(value=facts.least_level, origin=Origin.tier(facts.number), key="tier")
