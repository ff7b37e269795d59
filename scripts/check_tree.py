"""Check what no linter knows: file sizes, words and addresses that must not be committed, requirements.

Looks at every text file that git tracks or would track. Prints one line per finding.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_SOURCE_LINES = 650
VENDORED = "src/cloche/server/static/vendor/"

# Written in pieces, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b")
REGISTRY_HOSTS = [
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("npmjs", "org"),
    ("npmjs", "com"),
    ("yarnpkg", "com"),
    ("debian", "org"),
    ("crates", "io"),
    ("proxy.golang", "org"),
    ("rubygems", "org"),
    ("nuget", "org"),
]
REGISTRY = re.compile("|".join(re.escape(f"{name}.{domain}") for name, domain in REGISTRY_HOSTS))
# In a lock nothing but names, versions and hashes may stand.
LOCK_LEAKS = re.compile(r"--(?:extra-)?index-url|--find-links|\bfile:|https?:|\"resolved\"")
LOCKS = re.compile(r"requirements/.*\.(?:in|txt)|toolchains/.*\.json")
# Folders whose names tell nothing about the machine, or that a jail has too.
COMMON_TOP_FOLDERS = {"app", "etc", "home", "mnt", "opt", "root", "srv", "tmp", "usr", "var", "workspace"}


def tracked_files() -> list[Path]:
    """Return what git tracks or would track, deleted files left out."""
    git = ["git", "-c", f"safe.directory={ROOT}"]
    command = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(path for name in set(listing.split("\0")) - {""} if (path := ROOT / name).is_file())


def machine_paths() -> re.Pattern[str]:
    """Return what would give this machine away: the checkout, and a Python outside the standard folders."""
    found = {str(ROOT), sys.base_prefix}
    found = {path for path in found if path not in {"/", "/usr", "/usr/local", "/workspace"}}
    top = ROOT.parts[1]
    if top not in COMMON_TOP_FOLDERS:
        found.add(f"/{top}/")
    return re.compile(r"(?<![\w.-])(?:" + "|".join(re.escape(path) for path in sorted(found)) + ")")


def findings_in(name: str, text: str, machine: re.Pattern[str]) -> Iterator[str]:
    """Yield one sentence per line that must not be committed."""
    forbidden = [(REGISTRY, "a registry"), (machine, "a path of this machine")]
    if not name.startswith(VENDORED):  # what others wrote stays as it is
        forbidden.append((UNFINISHED, "unfinished work"))
    if LOCKS.fullmatch(name):
        forbidden.append((LOCK_LEAKS, "an address in a lock"))
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        for pattern, what in forbidden:
            if pattern.search(line):
                yield f"{name}:{number}: {what}: {line.strip()[:80]}"
    if name.startswith("src/") and len(lines) > MAX_SOURCE_LINES:
        yield f"{name}: {len(lines)} lines; split it, {MAX_SOURCE_LINES} is the ceiling"


def unequal_requirements() -> Iterator[str]:
    """Yield each requirements/*.in that does not say what pyproject.toml says."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = {"runtime": pyproject["project"]["dependencies"], **pyproject["dependency-groups"]}
    for name, wanted in declared.items():
        if (ROOT / "requirements" / f"{name}.in").read_text().split("\n")[:-1] != wanted:
            yield f"requirements/{name}.in: differs from pyproject.toml; make them equal, then `make lock`"


def main() -> int:
    """Print every finding; return 1 when there is one."""
    machine = machine_paths()
    found = list(unequal_requirements())
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            if path.suffix != ".png":
                found.append(f"{path.relative_to(ROOT)}: a binary file; only pictures are kept here")
            continue
        found += findings_in(str(path.relative_to(ROOT)), text, machine)
    print("\n".join(found) or "check_tree: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
