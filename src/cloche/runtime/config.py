"""What every source says, ranked: one mapping from words to values, each with its origin.

Theory of operation: every source becomes a layer of wishes, and layers are laid over one another, so the last
one wins: defaults < tier < the owner's files < the working directory's files < the `.env` that the user named <
environment < arguments. A preset is laid at the rank of the source that chose it, and only the highest source's preset
counts. What the working directory's files say went through `config_tighten` before. SANDBOX_TIMEOUT_SEC then replaces
the time-out, and the owner's ceilings cap everything. Reading happens in `config_sources`; from there on all is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cloche.core.levels import Level
from cloche.core.tiers import check_backend, tier_numbered

from .config_keys import AUTO, DEFAULT, DEFAULTS, LIMIT_FIELDS, Layer, Origin, Wish
from .config_readers import ANY_LANGUAGE
from .config_sources import Places, argument_layer, checkout_layers, env_file_layer, operator_layers, variable_layer
from .config_tighten import expand_preset, tightened

_NOTHING: Layer = MappingProxyType({})


def settle(arguments: Mapping[str, Any], places: Places) -> tuple[Layer, Mapping[str, Wish]]:
    """Return what holds, and the ceilings by the limit's word. Raises InvalidRequest naming source and
    key.
    """
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
    """Let a layer's words win; an image for any language takes the place of every image chosen below it.

    Whoever names another backend than docker has no use for the runtime that a weaker source demanded of docker.
    """
    if f"image.{ANY_LANGUAGE}" in layer:
        for word in [word for word in held if word.startswith("image.")]:
            del held[word]
    if "backend" in layer and layer["backend"].value != "docker":
        held["runtime"] = DEFAULTS["runtime"]
    held.update(layer)


def _without_reach(between: Layer, upper: Sequence[Layer]) -> Layer:
    """Turn the stranger's pair of mode and hosts into two words, unless a higher source decides about the
    network.
    """
    kept = {word: wish for word, wish in between.items() if word not in ("reach", "timeout_override")}
    pair = between.get("reach")
    if pair is None or any("network" in layer or "network_allow" in layer for layer in upper):
        return kept
    for word, value in zip(("network", "network_allow"), pair.value, strict=True):
        kept[word] = Wish(value=value, origin=pair.origin, key=pair.key)
    return kept


def _override_timeout(held: dict[str, Wish], between: Layer) -> None:
    """Let SANDBOX_TIMEOUT_SEC win over everything; a stranger's wins only downwards."""
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
