"""The pictures in docs/pictures that a script draws are what it draws now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.unit.test_layering import MAY_IMPORT

ROOT = Path(__file__).parents[2]


def test_the_pictures_are_what_the_script_draws() -> None:
    """docs/pictures/layers.svg has the table of allowed imports; after a change run scripts/pictures.py."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = {"layers.svg": module.layers(MAY_IMPORT), "processes.svg": module.processes()}
    assert {name: (module.FOLDER / name).read_text() for name in drawn} == drawn
    labels = {element.text for element in ET.fromstring(drawn["layers.svg"]).iter("{http://www.w3.org/2000/svg}text")}
    assert labels == set(MAY_IMPORT)
