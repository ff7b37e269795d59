"""What the operator allows: names, the age of a release. Pure."""

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

    `deny` holds for whatever would be installed, also what another package needs, and wins. `allow`, where there is
    one, holds for what is asked for by name: anything else needs somebody's approval. Both are names, in which `*`
    stands for any characters. Releases that are younger than `min_age_s` do not count, as if they were not there yet.
    `is_list_needed`: without a list nothing is listed, where otherwise all is. What has no wheel is built from source
    where `build` has its name, also one that another package needs.
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
                f"packages: {', '.join(denied)} may not be installed here (packages_deny); do without, or ask whoever "
                "runs this"
            )

    def unlisted(self, requirements: Iterable[Requirement]) -> tuple[str, ...]:
        """Return the names that are asked for and in no list of what is allowed; none where there is no list."""
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
        """Return the time up to which releases count, as uv takes it; empty for all."""
        if not self.min_age_s:
            return ""
        then = (now or datetime.now(UTC)) - timedelta(seconds=self.min_age_s)
        return then.strftime("%Y-%m-%dT%H:%M:%SZ")


def refuse_unlisted(names: Sequence[str]) -> PolicyDenied:
    """Return the error for packages that nobody allowed."""
    return PolicyDenied(
        f"packages: {', '.join(names)} is not among those that may be installed here (packages_allow), and nobody "
        "approved it; use what is listed, or ask whoever runs this"
    )
