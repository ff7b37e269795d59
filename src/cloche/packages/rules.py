"""The operator's rules: names, the age of a release. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from cloche.core.ceilings import matches_package
from cloche.core.errors import PolicyDenied
from cloche.core.record import dataclass

from .requirements import Requirement


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Say which packages may be installed.

    `deny` applies to every installed package, dependencies included, and wins. `allow`, if set, applies to packages
    requested by name: any other needs approval. Both are names; `*` stands for any characters. Releases younger than
    `min_age_s` are ignored, as if they did not exist. `is_list_needed`: without a list no package is listed, where
    otherwise all are. A package without a wheel is built from source if `build` has its name, also one that is a
    dependency.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    min_age_s: float = 0.0
    build: tuple[str, ...] = ()
    is_list_needed: bool = False

    def check_denied(self, names: Iterable[str]) -> None:
        """Raise PolicyDenied that names the packages which are denied."""
        denied = sorted({name for name in names if matches_package(name, self.deny)})
        if denied:
            raise PolicyDenied(
                f"packages: {', '.join(denied)} may not be installed here (packages_deny); leave them out, or ask "
                "the operator"
            )

    def unlisted(self, requirements: Iterable[Requirement]) -> tuple[str, ...]:
        """Return the requested names outside of the list; empty without a list."""
        if not self.allow and not self.is_list_needed:
            return ()
        return tuple(
            sorted(
                {requirement.name for requirement in requirements if not matches_package(requirement.name, self.allow)}
            )
        )

    def may_build(self, name: str) -> bool:
        """Tell whether a package may be built from source."""
        return matches_package(name, self.build)

    def newest(self, now: datetime | None = None) -> str:
        """Return the time after which releases are ignored, in uv's form; empty for all releases."""
        if not self.min_age_s:
            return ""
        then = (now or datetime.now(UTC)) - timedelta(seconds=self.min_age_s)
        return then.strftime("%Y-%m-%dT%H:%M:%SZ")


def refuse_unlisted(names: Sequence[str]) -> PolicyDenied:
    """Return the error for packages outside of the list."""
    return PolicyDenied(
        f"packages: {', '.join(names)} is not among those that may be installed here (packages_allow), and nobody "
        "approved it; use what is listed, or ask the operator"
    )
