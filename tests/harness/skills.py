"""Skills for tests, written as somebody would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CARD = "---\nname: {name}\ndescription: What it is for.\n---\n\nHow it is used.\n"


def write_skill(
    parent: Path, name: str = "demo", *, manifest: str | None = None, card: str | None = None, **files: str | bytes
) -> Path:
    """Create a skill's folder and return it; `files` are scripts by their names, dots written as two underscores."""
    named: Mapping[str, str | bytes] = {f"scripts/{key.replace('__', '.')}": text for key, text in files.items()}
    folder = parent / name
    (folder / "scripts").mkdir(parents=True)
    (folder / "SKILL.md").write_text(CARD.format(name=name) if card is None else card)
    if manifest is not None:
        (folder / "cloche-skill.yaml").write_text(manifest)
    for path, text in named.items():
        (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder
