"""The options of a sandbox, within what the operator configured and the caller may ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from cloche.config.keys import Settings
from cloche.config.options import SandboxOptions
from cloche.config.readers import ANY_LANGUAGE
from cloche.config.settings import load_settings
from cloche.core.enforcement import Level
from cloche.core.errors import PolicyDenied
from cloche.core.secret_names import SecretStore
from cloche.execution.prepare import level_kept, prepare_in_thread
from cloche.execution.registry import why_not_ready

from .callers import Caller
from .exec_options import backend_for_image, check_fields, check_limits_kept, check_not_looser, needs_presence
from .secrets import allowed_with_secrets


class Configured(Protocol):
    """Know the options that an operator configured."""

    @property
    def own_options(self) -> SandboxOptions:
        """Return the operator's options."""
        ...

    async def use_stored(self) -> None:
        """Apply stored settings from now on."""

    async def settings(self) -> Settings:
        """Return the current settings for runs."""
        ...

    @property
    def secret_store(self) -> SecretStore:
        """Return the secrets that are held for callers."""
        ...

    async def allowed_options(self, caller: Caller, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sandbox's options, checked against the caller's permissions."""
        ...


async def allowed_options(operator: Configured, caller: Caller, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sandbox's options, checked against the caller's permissions. Raises PolicyDenied, InvalidRequest."""
    if "secrets" in own:
        with_secrets = await allowed_with_secrets(operator, caller, own)
        if own["secrets"] and not caller.has("admin"):
            check_limits_kept(load_settings(with_secrets).policy, await operator.settings())
        return with_secrets
    check_fields(own, caller)
    if "image" in own:
        return await options_with_image(operator, caller, own)
    if not own or caller.has("admin"):  # it gets the configured settings
        await operator.use_stored()
        return {**operator.own_options, **own}
    base = await operator.settings()
    if own.get("screen") == base.policy.screen:  # if given, it would suppress the stricter default of level process
        own = {name: value for name, value in own.items() if name != "screen"}
    if "network_deny" in own:  # in addition to the configured ones
        own = {**own, "network_deny": list(dict.fromkeys([*base.policy.network_deny, *own["network_deny"]]))}
    options = {**operator.own_options, **own}
    check_not_looser(load_settings(options), base)
    return await keep_level(operator, own, options)


async def options_with_image(operator: Configured, caller: Caller, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sandbox's options with an image: by digest below scope admin, as far as the settings permit it."""
    image, base = str(own["image"]), await operator.settings()
    backend = str(own.get("backend") or backend_for_image(base))
    if not caller.has("admin") and needs_presence(image, base):
        lacking = partial(why_not_ready, backend, {ANY_LANGUAGE: image}, needs_image=True)
        if await asyncio.to_thread(lacking):
            raise PolicyDenied(f"image: {image} is not here; only images that are here are allowed (images_allow)")
    others = {name: value for name, value in own.items() if name != "image"}
    return {**await operator.allowed_options(caller, {**others, "backend": backend}), "image": image}


async def keep_level(operator: Configured, own: Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a `require` under which another backend is no weaker than the configured one."""
    if "backend" not in own and "require" not in own:
        return options
    base = await prepare_in_thread(**operator.own_options)
    minimum, *controls = await asyncio.to_thread(level_kept, base)
    policy = load_settings(options).policy  # checked by check_not_looser: it requires no less than the configuration
    level = max(Level.parse(minimum), policy.require_level or Level.NONE)
    return {**options, "require": [str(level), *dict.fromkeys([*controls, *map(str, policy.require_controls)])]}
