"""Run the programs of a column in sandboxes on the nodes of a Ray cluster, from Ray Data.

Run it with `python examples/ray_data.py`, with `ray[data]` and `cloche[ray]` on each node.
"""

from __future__ import annotations

from typing import Any

import ray

import cloche


def run_code(batch: dict[str, Any]) -> dict[str, Any]:
    """Add columns with what the programs of the column `code` printed, and how they ended."""
    with cloche.map(batch["code"], backend="ray", concurrency=2, timeout=10, memory="128m") as outcomes:
        results = list(outcomes)
    printed, ended = [result.stdout for result in results], [str(result.status) for result in results]
    return {**batch, "stdout": printed, "status": ended}


def main() -> None:
    """Square numbers."""
    programs = ray.data.from_items([{"code": f"print({number} ** 2)"} for number in range(12)])
    for row in programs.map_batches(run_code, batch_size=4).take_all():
        print(row["code"], row["status"], row["stdout"], end="")


if __name__ == "__main__":
    main()
