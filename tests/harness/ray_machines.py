"""Machines for Ray's autoscaler: nodes beside the head, as processes. Ray's monitor imports this by name."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class MachinesHere(FakeMultiNodeProvider):  # type: ignore[misc]
    """Ray's own provider for tests, for kinds of machines that have memory."""

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: dict[str, float], labels: Any
    ) -> None:
        """Start nodes; Ray counts their memory itself, and takes no figure for it here."""
        others = {name: amount for name, amount in resources.items() if name != "memory"}
        super().create_node_with_resources_and_labels(node_config, tags, count, others, labels)
