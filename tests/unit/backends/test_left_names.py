"""Which control groups are left over, by their names alone."""

import os

import pytest

from cloche.backends.garbage_collection import group_name, is_left_over, namespace, started_at

NAME = f"cloche-{os.getpid()}-local-{namespace()}-{started_at(os.getpid())}-a1"


def test_a_name_is_of_its_process_and_nobody_elses() -> None:
    """Two are never the same, and both are of a process that lives."""
    one, other = group_name("local"), group_name("local")
    assert one != other
    assert not is_left_over(one, "local")
    assert one.rpartition("-")[0] == NAME.rpartition("-")[0]


def test_of_another_process_with_our_number_it_is_left_over() -> None:
    """A number is given again; the start tells the two apart."""
    words = NAME.split("-")
    assert is_left_over("-".join([*words[:4], "1", words[5]]), "local")


@pytest.mark.parametrize(
    "name",
    [
        NAME.replace(f"-{namespace()}-", "-1-"),  # another namespace's numbers tell us nothing
        "cloche-1-a1",
        "cloche--local---a1",
        f"cloche-..-local-{namespace()}-1-a1",
        f"cloche-{os.getpid()}-gvisor-{namespace()}-1-a1",
        f"another-{os.getpid()}-local-{namespace()}-1-a1",
    ],
    ids=["another namespace's", "nobody's", "without words", "without a number", "for something else", "not ours"],
)
def test_what_may_be_anothers_stays(name: str) -> None:
    """Of another namespace, for something else, or not of ours at all."""
    assert not is_left_over(name, "local")
