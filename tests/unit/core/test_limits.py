"""The amounts a run may use."""

import pytest

from cloche.core.errors import InvalidRequest
from cloche.core.limits import GIB, KIB, MIB, PARSERS, Limits, parse_cpu_percent


def test_defaults_are_the_table_of_the_mission() -> None:
    """30 s, 256 MiB, half a CPU, 64 processes, 256 MiB of workspace, 64 KiB of output per stream."""
    limits = Limits()
    assert (limits.timeout_s, limits.memory_bytes, limits.cpus, limits.pids) == (30.0, 256 * MIB, 0.5, 64)
    assert (limits.disk_bytes, limits.inodes, limits.output_bytes) == (256 * MIB, 32_768, 64 * KIB)


def test_amounts_are_read_as_people_write_them() -> None:
    """Text with units is taken everywhere."""
    limits = Limits(memory_bytes="1g", timeout_s="2m", pids="7")  # type: ignore[arg-type]
    assert (limits.memory_bytes, limits.timeout_s, limits.pids) == (GIB, 120, 7)


@pytest.mark.parametrize("name", PARSERS)
def test_no_limit_can_be_zero(name: str) -> None:
    """Zero is refused for every limit, by its name."""
    with pytest.raises(InvalidRequest, match=name):
        Limits(**{name: 0})


def test_memory_has_a_least_amount() -> None:
    """Less than an interpreter needs to start is a mistake of units, and is said so."""
    with pytest.raises(InvalidRequest, match="memory_bytes: 256 is below the smallest workable amount, 16m"):
        Limits(memory_bytes=256)


def test_changes_of_none_are_none() -> None:
    """None in a change leaves the value alone."""
    assert Limits().with_changes(pids=None, cpus=2).as_dict() == {**Limits().as_dict(), "cpus": 2.0}


def test_ceilings_only_lower() -> None:
    """A ceiling lowers what exceeds it and raises nothing."""
    capped = Limits(memory_bytes=GIB, pids=4).capped_by({"memory_bytes": 512 * MIB, "pids": 100})
    assert (capped.memory_bytes, capped.pids) == (512 * MIB, 4)
    with pytest.raises(InvalidRequest, match="unknown limit 'speed'"):
        Limits().capped_by({"speed": 1})


def test_percent_of_a_cpu() -> None:
    """50 percent is half a CPU, with or without the sign."""
    assert parse_cpu_percent(50, name="x") == parse_cpu_percent("50%", name="x") == 0.5
