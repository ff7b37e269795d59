"""The simulation of a large fleet (`python -m bench.fleet_simulation`), with a small one."""

import pytest

from bench.fleet_simulation import MODES, Mode, Simulation


@pytest.mark.parametrize("mode", MODES)
def test_each_program_has_one_result_whatever_is_lost(mode: Mode) -> None:
    """Though nodes and the coordinator die, each program has exactly one result, and nothing is left."""
    figures = Simulation(mode, 20, 1000, losses=10, restarts=2).run()
    assert figures.faults == []
    assert figures.restarts == 2
    assert figures.repeated > 0
