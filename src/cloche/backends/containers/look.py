"""Look what programs an image holds: a script for any `sh`, and the programs that it is asked about."""

from __future__ import annotations

from cloche.core.languages import LANGUAGES

PROGRAMS = tuple(dict.fromkeys(name for lang in LANGUAGES.values() for one in lang.engines for name in one.programs))
# One line per program that is there: its name, its path, the first line that it says of its version.
LOOK = """
for name in "$@"; do
  path=$(command -v "$name" 2>/dev/null) || continue
  case $name in
    go) version=$("$path" version 2>&1 </dev/null | head -n 1) ;;
    env|sh|tsx|cc) version= ;;
    *) version=$("$path" --version 2>&1 </dev/null | head -n 1) ;;
  esac
  printf '%s\\t%s\\t%s\\n' "$name" "$path" "$version"
done
"""
