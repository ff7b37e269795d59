"""What virtual machines are made of, decided without one: words, settings, images, and what is said of them."""

from __future__ import annotations

import io
import json
import lzma
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.backends.enforcement import microvm_controls
from cloche.backends.microvm import guest_init, machine
from cloche.backends.microvm.backend import MicroVMBackend
from cloche.backends.microvm.image_build import ENTRY_NOTES, module_order, pack_archive, unpack_kernel, upstream
from cloche.backends.microvm.plan import (
    DISK,
    FORMAT,
    FULL_CONTAINERS,
    INITRD,
    KERNEL,
    MANIFEST,
    VARIABLE,
    find_image,
    plan_machine,
)
from cloche.backends.microvm.qemu import Descriptors, arguments
from cloche.core.enforcement import Control, State
from cloche.core.errors import BackendUnavailable, InvalidRequest, StartFailed
from cloche.core.languages import LANGUAGES
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.execution.registry import build_image, capabilities_of
from cloche.jail.setup.seccomp import first_process_filter

KEEPER = Path(machine.__file__).with_name("jailer.py")
GIVEN = Descriptors(kernel=11, initrd=12, disk=13, ports=(14, 15, 16))


def words(**limits: float) -> list[str]:
    """Return what QEMU is started with, emulated."""
    return arguments("/usr/bin/qemu", plan_machine(Policy(), Limits(**limits), "tcg"), GIVEN)  # type: ignore[arg-type]


def test_the_disk_is_for_reading_on_the_outside() -> None:
    """No mount of the guest's makes it writable: the monitor itself may not write."""
    for word in words():
        if word.startswith("driver="):
            assert "read-only=on" in word


def test_a_machine_has_nothing_that_is_not_listed() -> None:
    """No network, no default devices, no path of the host's; QEMU under its own filter."""
    said = words()
    devices = [said[at + 1].partition(",")[0] for at, word in enumerate(said) if word == "-device"]
    assert devices == ["virtio-blk-device", "virtio-serial-device", *["virtserialport"] * len(GIVEN.ports)]
    assert {"-nodefaults", "-no-user-config", "-no-reboot"} <= set(said)
    assert not [word for word in said if word.startswith(("-net", "-nic", "-virtfs", "-fsdev"))]
    assert said[said.index("-sandbox") + 1].split(",")[0] == "on"


@pytest.mark.parametrize(("cpus", "processors"), [(0.5, 1), (1, 1), (1.5, 2), (4, 4), (1000, 16)])
def test_processors_are_rounded_up(cpus: float, processors: int) -> None:
    """The quota inside is exact, the machine around it has whole ones; an emulated one has no second, ever."""
    assert plan_machine(Policy(), Limits(cpus=cpus), "kvm").processors == processors
    assert plan_machine(Policy(), Limits(cpus=cpus), "tcg").processors == 1


def test_a_machine_has_room_for_what_it_may_store() -> None:
    """The memory of a machine is what programs may use, what their files may take, and what the kernel needs."""
    limits = Limits(memory_bytes=64 * MIB, disk_bytes=10 * MIB, tmp_bytes=5 * MIB)
    plan = plan_machine(Policy(), limits, "kvm")
    assert limits.memory_bytes + 20 * MIB < plan.memory_bytes < plan.machine_bytes
    assert FULL_CONTAINERS * (limits.memory_bytes + 10 * MIB) + 10 * MIB < plan.all_bytes < plan.machine_bytes
    assert plan.settings(now=1.5, seed=b"\1\2")["memory_bytes"] == plan.memory_bytes
    assert json.loads(json.dumps(plan.settings(now=1.5, seed=b"\1\2")))["seed"] == "0102"


def test_a_machine_of_a_sandbox_that_lives_has_room_for_one_container() -> None:
    """Its container may have more folders to write to, has terminals, and cannot limit its first process."""
    plan = plan_machine(Policy(), Limits(), "kvm", is_live=True, homes=("/var",))
    assert plan.memory_bytes == plan.all_bytes < plan.machine_bytes < plan_machine(Policy(), Limits(), "kvm").all_bytes
    said = plan.settings(now=1.5, seed=b"")
    assert (said["homes"], said["has_terminals"]) == (["/var"], True)
    assert bytes.fromhex(said["filter"]) == first_process_filter("x86_64")
    assert not plan_machine(Policy(), Limits(), "kvm").settings(now=1.5, seed=b"")["filter"]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("stale", [0, 1, 7, 10, 15])
def test_a_program_is_read_to_its_end_and_no_further(size: int, stale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left in a port is passed over; what follows the program is for the program, however it is cut."""
    mark, program, sent = b"0123456789abcdef", b"pass" * 50_000, io.BytesIO()
    port = io.BytesIO(b"stale 012345678"[:stale] + mark + f"{len(program):09d}".encode() + program + b"more")
    monkeypatch.setattr(guest_init, "read_some", lambda most: port.read(min(most, size)))
    monkeypatch.setattr(guest_init, "write_all", lambda _, data: sent.write(data))
    assert guest_init.take_program(mark) == program
    assert (sent.getvalue(), port.read()) == (mark, b"more")


def test_emulation_is_said() -> None:
    """What QEMU's own authors do not call a wall is partial, with the reason; on KVM it is enforced."""
    emulated = microvm_controls("tcg", is_root=True)[Control.SYSCALLS]
    assert emulated.state is State.PARTIAL
    assert "emulation" in emulated.reason
    assert microvm_controls("kvm", is_root=True)[Control.SYSCALLS].state is State.ENFORCED


@pytest.mark.parametrize(("is_root", "state"), [(True, State.ENFORCED), (False, State.PARTIAL)])
def test_whose_the_monitor_is(is_root: bool, state: State) -> None:
    """From an ordinary user it has that user's id."""
    assert microvm_controls("kvm", is_root=is_root)[Control.IDENTITY].state is state


def bootable(payload: bytes) -> bytes:
    """Return an image as boot loaders take it, with a packed kernel in it."""
    image = bytearray(2 * 512)
    image[0x1F1] = 1
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 16, len(payload))
    return bytes(image) + bytes(16) + payload + b"rest"


def test_a_kernel_is_unpacked() -> None:
    """What every monitor can load is inside of what boot loaders take."""
    inside = b"\x7fELF" + bytes(100) + ENTRY_NOTES[1] + bytes(8)
    assert unpack_kernel(bootable(lzma.compress(inside))) == inside


@pytest.mark.parametrize("inside", [b"\x7fELF without an entry", b"no kernel at all"])
def test_a_kernel_that_monitors_cannot_enter_stays_as_it_is(inside: bytes) -> None:
    """QEMU unpacks it then, as boot loaders do."""
    image = bootable(lzma.compress(inside))
    assert unpack_kernel(image) == image
    assert unpack_kernel(b"short") == b"short"


def test_modules_come_in_an_order_that_loads(tmp_path: Path) -> None:
    """What a module depends on comes before it, whatever is built in not at all; packed ones are looked into."""
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "a-b.ko").write_bytes(b"\0depends=c,built\0")
    (tmp_path / "kernel" / "c.ko.xz").write_bytes(lzma.compress(b"\0license=GPL\0depends=\0"))
    (tmp_path / "modules.builtin").write_text("kernel/built.ko\n")
    assert [path.name for path in module_order(tmp_path, ["a_b", "c", "built"])] == ["c.ko.xz", "a-b.ko"]
    with pytest.raises(StartFailed, match="no module 'd'"):
        module_order(tmp_path, ["d"])


def test_the_first_file_system_is_an_archive_that_others_read(tmp_path: Path) -> None:
    """The kernel's format, byte by byte: names, modes, contents."""
    entries = [("bin", stat.S_IFDIR | 0o755, b""), ("bin/x", stat.S_IFREG | 0o755, b"content"), ("e", 0o100644, b"")]
    packed = pack_archive(entries)
    assert len(packed) % 4 == 0
    done = subprocess.run(["busybox", "cpio", "-i", "-d"], input=packed, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bin" / "x").read_bytes() == b"content"
    assert stat.S_IMODE((tmp_path / "bin" / "x").stat().st_mode) == 0o755


def place_image(folder: Path, **changes: object) -> None:
    """Write an image of nothing."""
    manifest = {"format": FORMAT, "id": "ab" * 32, "python": "3.11", "programs": {"python3": "/usr/bin/python3"}}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "versions": {"python3": "3.11.2"}, **changes}))
    for name in (KERNEL, INITRD, DISK):
        (folder / name).touch()


def test_an_image_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was built elsewhere, say; it says what it can run, and how to get the rest."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    place_image(tmp_path)
    image = find_image()
    engine = image.engine(LANGUAGES["python"])
    assert (engine.name, image.version(engine)) == ("python3", "3.11.2")
    with pytest.raises(BackendUnavailable, match='images build --package nodejs"'):
        image.engine(LANGUAGES["javascript"])


@pytest.mark.parametrize("wrong", ["nothing", "format", "no disk"])
def test_a_missing_image_has_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Whatever is wrong with it, building one helps."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    if wrong != "nothing":
        place_image(tmp_path, **({"format": 0} if wrong == "format" else {}))
    if wrong == "no disk":
        (tmp_path / DISK).unlink()
    with pytest.raises(BackendUnavailable, match='cloche images build"'):
        find_image()


def test_a_missing_monitor_has_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked for beyond it."""
    monkeypatch.setenv("PATH", "/nowhere")
    found = capabilities_of("microvm")
    assert not found.available
    assert "qemu-system-x86_64" in found.reason
    assert "apt-get install" in found.remedy
    with pytest.raises(BackendUnavailable, match="default backend"):
        MicroVMBackend().check()


def test_only_machines_have_images_to_build() -> None:
    """A container's image comes from elsewhere."""
    with pytest.raises(InvalidRequest, match="microvm does"):
        build_image("local", ())


@pytest.mark.parametrize(
    ("version", "expected"), [("2:1.19~1", "1.19"), ("3.11.2-1+b1", "3.11.2"), ("18.20.4+dfsg-1~deb12u1", "18.20.4")]
)
def test_a_packages_version_is_its_programs(version: str, expected: str) -> None:
    """Without what the distribution adds."""
    assert upstream(version) == expected


def keep(program: list[str], lifeline: int) -> subprocess.Popen[bytes]:
    """Start a keeper over a program that stands for the monitor."""
    order = json.dumps({"argv": program, "user": 1_950_000_000 if os.geteuid() == 0 else 0, "devices": {}})
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(KEEPER), order], stdin=lifeline, stdout=subprocess.PIPE, env={}
    )


@pytest.mark.parametrize("end", ["a word", "the end of the pipe"])
def test_a_monitor_ends_with_its_caller(end: str) -> None:
    """A word on the lifeline, or its end, kills the monitor, and the keeper is gone after it."""
    theirs, ours = os.pipe()
    keeper = keep(["/bin/sh", "-c", "echo $$; exec sleep 60"], theirs)
    os.close(theirs)
    assert keeper.stdout is not None
    with keeper.stdout as said:
        monitor = int(said.readline())
        if end == "a word":
            os.write(ours, b"k")
            assert keeper.wait() == 256 - 9
        os.close(ours)
        assert keeper.wait() == 256 - 9
    assert not Path(f"/proc/{monitor}").exists()


def test_a_monitor_dies_with_its_keeper() -> None:
    """Killed itself, the keeper leaves nobody behind."""
    theirs, ours = os.pipe()
    keeper = keep(["/bin/sh", "-c", "echo $$; exec sleep 60"], theirs)
    os.close(theirs)
    assert keeper.stdout is not None
    with keeper.stdout as said:
        said.readline()
        keeper.kill()
        keeper.wait()
        assert said.read() == b""  # the other end is closed, so the monitor is dead
    os.close(ours)


def test_a_monitor_has_no_privileges_and_no_descriptors() -> None:
    """It gets an id of its own, no new privileges, no environment, no core files, and the files that are named."""
    theirs, ours = os.pipe()
    script = "id -u; grep -E 'NoNewPrivs|CapEff' /proc/self/status; ls /proc/self/fd; ulimit -c; cat /proc/net/dev"
    keeper = keep(["/bin/sh", "-c", script], theirs)
    os.close(theirs)
    assert keeper.stdout is not None
    with keeper.stdout as said:
        text = said.read().decode()
    keeper.wait()
    os.close(ours)
    lines = text.split("\n")
    if os.geteuid() == 0:
        assert int(lines[0]) >= 1_950_000_000
        assert [line for line in lines if ":" in line and "lo:" not in line and "CapEff" in line] == [
            "CapEff:\t0000000000000000"
        ]
        assert not [line for line in lines if "eth" in line]
    assert "NoNewPrivs:\t1" in lines
    numbers = [line for line in lines if line.isdigit()][1:]
    assert set(numbers) <= {"0", "1", "2", "3"}  # the last is what `ls` reads
