"""Npm packages by name: requirements, and how they differ from Python requirements. Pure.

A requirement is a name and a range of versions. npm's other forms (an address, git, a path, an alias, a tag) would let
the author of the requirement choose the origin of code, which is the operator's choice alone.
"""

from __future__ import annotations

import re

PREFIX = "npm:"
LATEST = "latest"  # the one tag that is taken: what the registry gives whoever says nothing
MOST_NAME_CHARS = 214  # npm's own bound

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?:@{_PART}/)?{_PART}")
_NUMBER = r"(?:[0-9]{1,15}|[xX*])"
_LABEL = r"[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*"
_VERSION = rf"v?{_NUMBER}(?:\.{_NUMBER}(?:\.{_NUMBER}(?:-{_LABEL})?(?:\+{_LABEL})?)?)?"
_COMPARATOR = rf"(?:(?:\^|~>?|[<>]=?|=) ?)?{_VERSION}"
_SET = rf"(?:{_VERSION} - {_VERSION}|{_COMPARATOR}(?: {_COMPARATOR})*)"
_RANGE = re.compile(rf"{_SET}(?: ?\|\| ?{_SET})*")
_PLACE = re.compile(r"[a-z][a-z0-9+.-]*:|[~.]?\.?/|git@", re.IGNORECASE)
_ONLY = "a requirement of npm is npm:NAME or npm:NAME@RANGE"


def is_npm(text: str) -> bool:
    """Tell whether the name of a package, or a requirement, is npm's."""
    return text.startswith(PREFIX)


def parse_npm(text: str) -> tuple[str, str]:
    """Return name and range of `npm:NAME@RANGE`; the range is empty if it is missing.

    Raises ValueError with the fault and a valid form.
    """
    name, separator, version_range = (
        text.removeprefix(PREFIX).partition("@") if not text.startswith(f"{PREFIX}@") else _scoped(text)
    )
    name, version_range = name.strip(), " ".join(version_range.split())
    if not _NAME.fullmatch(name) or len(name) > MOST_NAME_CHARS or "node_modules" in name.split("/"):
        why = "names a place to download from" if _PLACE.match(name) or "/" in name else "has no name of a package"
        raise ValueError(f"{why}; {_ONLY}")
    if separator and version_range != LATEST and not _RANGE.fullmatch(version_range):
        raise ValueError(f"{_what_else(version_range)}; {_ONLY}")
    return name, version_range


def _scoped(text: str) -> tuple[str, str, str]:
    """Split a requirement whose name has a scope, which itself contains an @."""
    name, separator, version_range = text.removeprefix(f"{PREFIX}@").partition("@")
    return f"@{name}", separator, version_range


def _what_else(version_range: str) -> str:
    """Name the form that stands in place of a range."""
    if _PLACE.match(version_range) or "/" in version_range:
        is_alias = version_range.lower().startswith(PREFIX)
        return "is an alias for another package" if is_alias else "names a place to download from"
    if re.fullmatch(_PART, version_range):
        return f"has a tag, {version_range[:40]!r}, which may mean another version tomorrow"
    return "has no range of versions"
