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

from .config_autofix import NUMBERS
from .config_keys import LIMIT_FIELDS, ROOTS, Layer, Wish, shown_limit

_FIELD_WORDS = {field: word for word, field in LIMIT_FIELDS.items()}
_SCREENS = ("off", "warn", "block")
_NETWORKS = ("off", "allowlist", "open")
# No tier stands between 4 (the host) and 3 (a jail or stronger).
_TIER_STRENGTH: Mapping[int | None, int] = {4: 0, None: 1, 3: 2, 2: 3, 1: 4}
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
    origin = f"preset {preset.name} ({wish.origin})"
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
    return "open" if layer["network_allow"].origin == "default" else "allowlist"


def _loosens(word: str, wish: Wish, held: Layer) -> bool:
    if word.startswith("image."):
        return word not in held or held[word].value != wish.value
    if word.startswith("roots."):
        return bool(wish.value) and (word not in held or held[word].value != wish.value)
    if word == "backend":
        return _backend_loosens(wish.value, held)
    if word == "reach":
        return _reach_loosens(wish.value, _reach(held))
    if word == "timeout_override":
        return bool(wish.value > held["timeout"].value)
    if word in LIMIT_FIELDS:
        return bool(wish.value > held[word].value)
    rule = _RULES.get(word)
    return rule is None or rule(wish.value, held[word].value)


def _never(_new: object, _old: object) -> bool:
    return False


# For each word, whether a new value asks for more than the one that is held. A word that is not here is
# refused.
_RULES: Mapping[str, Callable[[Any, Any], bool]] = {
    "tier": lambda new, old: _TIER_STRENGTH[new] < _TIER_STRENGTH[old],
    "preset": _never,  # a name; what it stands for is judged word by word
    "screen": lambda new, old: _SCREENS.index(new) < _SCREENS.index(old),
    "require_level": _never,  # joined with what is required already
    "require_controls": _never,
    "best_effort": lambda new, old: not set(new) <= set(old),
    "languages": lambda new, old: not set(new) <= set(old),
    "packages": lambda new, old: new != old and new != () and (old == "auto" or not set(new) <= set(old)),
    "user": lambda new, old: old is not None and new != old,
    "seccomp": lambda new, old: old and not new,
    "warm": lambda new, old: new and not old,  # fewer things shared between runs is the tighter choice
    "preload": lambda new, old: not set(new) <= set(old),
    "runtime": lambda new, old: new != old,  # docker's own shuts gVisor out
    "prefer": lambda new, old: new == "fastest" != old,
    "fallback": lambda new, old: new != "none" and new != old,
    "audit": lambda new, old: not new and old is not False,  # where and what is kept is the owner's choice alone
    **dict.fromkeys(NUMBERS, lambda new, old: new > old),
}


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


def _met(word: str, wish: Wish, base: Layer) -> Wish:
    """Return the wish joined with what is required already; any other accepted wish is tight as it is."""
    if word == "require_level" and base[word].value is not None:
        return wish if wish.value > base[word].value else base[word]
    if word == "require_controls":
        joined = tuple(dict.fromkeys((*base[word].value, *wish.value)))
        return Wish(value=joined, origin=wish.origin, key=wish.key)
    return wish


def _tighter(word: str, one: Wish, other: Wish) -> Wish:
    """Return what two accepted wishes come to together."""
    if word == "reach":
        return _joined(other, _narrower(one.value, other.value))
    if word in ("best_effort", "languages", "packages", "preload") and "auto" not in (one.value, other.value):
        return _joined(other, tuple(item for item in one.value if item in other.value))
    if word == "require_controls":
        return _joined(other, tuple(dict.fromkeys((*one.value, *other.value))))
    return max(one, other, key=lambda wish: _tightness(word, wish.value))


def _joined(wish: Wish, value: object) -> Wish:
    return Wish(value=value, origin=wish.origin, key=wish.key)


def _narrower(one: tuple[str, tuple[str, ...]], other: tuple[str, tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
    if one[0] == other[0] == "allowlist":
        return "allowlist", tuple(host for host in one[1] if host in other[1])
    return min(one, other, key=lambda reach: _NETWORKS.index(reach[0]))


def _tightness(word: str, value: Any) -> float:  # noqa: ANN401  # as many types as there are words
    """Return a number that grows as an accepted value gets tighter."""
    if word in (*LIMIT_FIELDS, *NUMBERS) or word == "timeout_override":
        return -float(value)
    tables: Mapping[str, Callable[[Any], float]] = {
        "tier": lambda tier: _TIER_STRENGTH[tier],
        "backend": lambda name: _BACKEND_STRENGTH.get(name, -1),
        "screen": _SCREENS.index,
        "require_level": lambda level: level,
        "packages": lambda packages: packages == (),
        "warm": lambda is_warm: not is_warm,
        "prefer": lambda prefer: prefer == "strongest",
        "fallback": lambda fallback: fallback == "none",
        "audit": bool,
        **dict.fromkeys((f"roots.{root}" for root in ROOTS), lambda folder: not folder),
    }
    return tables[word](value) if word in tables else 0.0


def _refusal(word: str, wish: Wish, full: Layer) -> InvalidRequest:
    shown = {"reach": "network", "timeout_override": "timeout"}.get(word, word)
    value = wish.value[0] if word == "reach" else wish.value
    held = full.get(shown)
    without = f"; without it {_text(shown, held.value)} holds ({held.origin})" if held is not None else ""
    file = _file_of(wish)
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


def _file_of(wish: Wish) -> str:
    """Return the file behind an origin such as `preset minimal (/a/cloche.yaml)`."""
    return wish.origin.partition("(")[2].rstrip(")") if wish.origin.startswith("preset ") else wish.origin
