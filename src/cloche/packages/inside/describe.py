"""Write a wheel's metadata as JSON: `name`, `version`, `requires`, `python`, `extras`.

Standard input is JSON: `wheel`, its path. No code of the package runs.
"""

from __future__ import annotations

import json
import sys
import zipfile
from email.parser import BytesParser

MOST_METADATA = 16 << 20


def metadata(path: str) -> bytes:
    """Return the metadata of a wheel. Exits unless there is exactly one metadata file."""
    with zipfile.ZipFile(path) as wheel:
        members = [
            entry
            for entry in wheel.infolist()
            if entry.filename.count("/") == 1 and entry.filename.endswith(".dist-info/METADATA")
        ]
        if len(members) != 1:
            sys.exit("it does not have exactly one set of metadata")
        with wheel.open(members[0]) as file:
            return file.read(MOST_METADATA)


def main() -> None:
    """Write it."""
    try:
        headers = BytesParser().parsebytes(metadata(json.load(sys.stdin)["wheel"]), headersonly=True)
    except Exception as error:  # of zlib's, of a zip file that is none, or of text that is none
        sys.exit(f"it cannot be read: {type(error).__name__}: {error}")
    facts = {
        "name": str(headers.get("Name", "")), "version": str(headers.get("Version", "")),
        "requires": [str(requirement) for requirement in headers.get_all("Requires-Dist", [])],
        "python": str(headers.get("Requires-Python", "")),
        "extras": [str(extra) for extra in headers.get_all("Provides-Extra", [])],
    }  # fmt: skip
    json.dump(facts, sys.stdout)


if __name__ == "__main__":
    main()
