"""Print pip's settings as those of uv, which does not read pip's, as lines for a shell: `eval "$(...)"`.

What uv has been told itself (UV_*) wins. Nothing is written to a file: the package index is this machine's own.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys

# pip's name -> uv's variable, others that mean the same to uv, and what stands between two values.
WORDS = {
    "index-url": ("UV_DEFAULT_INDEX", ("UV_INDEX_URL",), " "),
    "extra-index-url": ("UV_INDEX", ("UV_EXTRA_INDEX_URL",), " "),
    "find-links": ("UV_FIND_LINKS", (), ","),
    "trusted-host": ("UV_INSECURE_HOST", (), " "),
    "cert": ("SSL_CERT_FILE", (), " "),
    "timeout": ("UV_HTTP_TIMEOUT", (), " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", (), " "),
}
WEIGHT = ("global", "install", ":env:")  # the later wins


def pip_settings() -> dict[str, str]:
    """Return pip's settings by name, whatever file or variable they are from."""
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    found = {}
    for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in WEIGHT:
            found[name, WEIGHT.index(section)] = str(ast.literal_eval(value))
    return {name: value for (name, _), value in sorted(found.items())}


def main() -> None:
    """Print one line for each setting."""
    settings = pip_settings()
    for name, (variable, others, between) in WORDS.items():
        if settings.get(name) and not any(one in os.environ for one in (variable, *others)):
            print(f"export {variable}={shlex.quote(between.join(settings[name].split()))}")
    if "extra-index-url" in settings:
        # pip takes what fits best of all that it is told; our locks say by hash what that is.
        print("export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}")


if __name__ == "__main__":
    main()
