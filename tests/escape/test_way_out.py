"""Attempts to get out with the files: what the guest leaves in the workspace is hostile when the host collects it."""

from functools import partial

from tests.harness.escape.attempts import BOTH, Attempt
from tests.harness.escape.checks import races, reads, saved, saved_over, writes
from tests.harness.escape.controls import Controls

out = partial(Attempt, family="way out", check=saved)
file_out = partial(Attempt, family="way out", code="pass")

SWAP = """
        import time
        open("good", "w").write("harmless")
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            {make}
            os.rename("next", "loot")
            os.link("good", "next2")
            os.rename("next2", "loot")
        """

ATTEMPTS = (
    out(name="a link to a secret", levels=BOTH, code="""os.symlink(T["public"], "loot")"""),
    out(name="a link that climbs", code="""os.symlink("../" * 30 + T["public"][1:], "loot")"""),
    out(name="a link to a link", code="""os.symlink("second", "loot"); os.symlink(T["public"], "second")"""),
    out(name="a link to a folder of secrets", levels=BOTH, code="""os.symlink(T["home"], "loot")"""),
    out(
        name="a link by way of a folder link",
        code="""os.symlink(T["folder"], "folder"); os.symlink("folder/public", "loot")""",
    ),
    out(name="a link to the collector's environment", code="""os.symlink("/proc/self/environ", "loot")"""),
    out(name="a link to the collector's descriptors", code="""os.symlink("/proc/self/fd", "loot")"""),
    out(name="a link to an endless device", code="""os.symlink("/dev/zero", "loot")"""),
    out(
        name="a link to itself",
        code="""os.symlink(".", "again"); os.symlink(T["public"], "loot")""",
    ),
    out(
        name="a hard link to a secret",
        code="""
        try:
            os.link(T["public"], "loot")
        except OSError:
            pass
        """,
    ),
    out(name="a fifo that hangs the reader", levels=BOTH, code="""os.mkfifo("loot")"""),
    out(
        name="a fifo among many files",
        code="""
        os.makedirs("a/b/c")
        for name in ("a/1", "a/b/2", "a/b/c/3"):
            open(name, "w").write(name)
        os.mkfifo("a/b/c/loot")
        """,
    ),
    out(
        name="a device",
        root_only="mknod needs CAP_MKNOD on the host",
        code="""
        import stat
        try:
            os.mknod("loot", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        except OSError:
            pass
        """,
    ),
    out(
        name="a set-user-ID program",
        levels=BOTH,
        code="""open("loot", "w").write("#!/bin/sh"); os.chmod("loot", 0o6755)""",
    ),
    out(
        name="a huge file that holds nothing",
        limits={"disk": "16m"},
        code="""os.truncate(os.open("loot", os.O_CREAT | os.O_RDWR), 200 << 20)""",
    ),
    out(
        name="one file under many names",
        limits={"disk": "16m"},
        code="""
        open("loot", "wb").write(bytes(4 << 20))
        for number in range(40):
            os.link("loot", f"loot{number}")
        """,
    ),
    out(
        name="over a link in the target",
        check=saved_over({"loot": "victim"}),
        levels=BOTH,
        code="""open("loot", "w").write("harm")""",
    ),
    out(
        name="through a folder link in the target",
        check=saved_over({"folder": "folder"}),
        code="""
        os.mkdir("folder")
        open("folder/victim", "w").write("harm")
        """,
    ),
    out(
        name="with names that are terminal commands and paths",
        check=saved_over({"..loot": "victim"}),
        code="""
        for name in (b"..loot", b"-rf", b"a\\nb", b"\\xff\\xfe", b"\\x1b[2J", b"con", b"..."):
            open(name, "w").write("harm")
        """,
    ),
    file_out(name="read a link", check=reads("loot"), levels=BOTH, code="""os.symlink(T["public"], "loot")"""),
    file_out(
        name="read through a folder link",
        check=reads("folder/public"),
        code="""os.symlink(os.path.dirname(T["public"]), "folder")""",
    ),
    file_out(name="read by climbing", check=reads("../../../../../../..{public}"), levels=BOTH),
    file_out(name="read by an absolute path", check=reads("{public}"), levels=BOTH),
    file_out(
        name="read the reader's descriptors",
        check=reads("loot"),
        code="""os.symlink(f"/proc/self/fd/{T['descriptor']}", "loot")""",
    ),
    file_out(name="read a fifo", check=reads("loot"), levels=BOTH, code="""os.mkfifo("loot")"""),
    file_out(name="write over a link", check=writes("loot"), levels=BOTH, code="""os.symlink(T["victim"], "loot")"""),
    file_out(
        name="write through a folder link",
        check=writes("folder/victim"),
        code="""os.symlink(T["folder"], "folder")""",
    ),
    file_out(name="write by climbing", check=writes("../../../../../../..{victim}"), levels=BOTH),
    file_out(name="write by an absolute path", check=writes("{victim}"), levels=BOTH),
    file_out(name="write into a fifo", check=writes("loot"), code="""os.mkfifo("loot")"""),
    file_out(
        name="a race for reading",
        check=races("read"),
        code=SWAP.format(make='os.symlink(T["public"], "next")'),
    ),
    file_out(
        name="a race for writing",
        check=races("write"),
        code=SWAP.format(make='os.symlink(T["victim"], "next")'),
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """Only regular files come out, only what the guest wrote, and only to where the host said."""
    controls.assert_contained(attempt, where)
