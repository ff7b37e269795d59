"""Write deploy/kubernetes/fleet.yaml from the manifests of a fleet; a test compares them."""

from pathlib import Path

from cloche.core.fleet_settings import FleetSettings
from cloche.fleets.kubernetes.applying import printed

IMAGE = "cloche-node"  # kustomization.yaml names the real one

HEAD = "# Made by scripts/manifests.py; `cloche fleet up --engine kubernetes` prints it for your settings.\n"

if __name__ == "__main__":
    file = Path(__file__).parents[1] / "deploy" / "kubernetes" / "fleet.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(HEAD + printed(FleetSettings(image=IMAGE)))
