"""What a file that nobody vetted may say: less, never more.

Theory of operation: `tightened` is pure. It is given what each file of the working directory says, what holds
at the rank of files without them (`base`), and what holds in the end without them (`full`, with the
environment and the arguments). A word that asks for more than both is refused by name; one that asks for more
than `base` only is without effect, as the environment or an argument decides it; what is left can only
tighten and is taken, the tightest of several files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.presets import preset_named
from cloche.core.tiers import BACKEND_ROWS

from .config_keys import BY_NAME, DEFAULT, LIMIT_FIELDS, Layer, Origin, Wish, shown_limit, with_value

_FIELD_WORDS = {field: word for word, field in LIMIT_FIELDS.items()}
_NETWORKS = ("off", "allowlist", "open")
_BACKEND_STRENGTH: Mapping[str, int] = {
    name: row.strength for name, row in BACKEND_ROWS.items() if row.strength is not None
}
_AUTO_STRENGTH = 4  # it may already be anything up to a virtual machine


def expand_preset(layer: Layer) -> Layer:
    """Return the layer with what its preset stands for; the layer's own words win."""
    wish = layer.get("preset")
    if wish is None:
        return layer
    preset = preset_named(wish.value)
    origin = Origin.preset(preset.name, wish.origin)
    words = {_FIELD_WORDS[field]: value for field, value in preset.limits.items()} | dict(preset.policy)
    return {**{word: Wish(value=v, origin=origin, key=wish.key) for word, v in words.items()}, **layer}


def tightened(layers: Sequence[Layer], base: Layer, full: Layer) -> Layer:
    """Return one layer that holds what `layers` tighten. Raises InvalidRequest naming file and key of what
    loosens.
    """
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
    """Make mode and hosts one word, as neither says alone what can be reached."""
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
