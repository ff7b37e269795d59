"""What the guest-side drivers of live sessions promise alike, shown with each as a plain subprocess."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.harness.sessions import CTRL_C, Driver

pytestmark = pytest.mark.toolchain

BOTH = ("javascript", "bash")
Open = Callable[..., Driver]

# What both promise: the same claim in two languages.
PRINT = {"javascript": "console.log({})", "bash": "echo {}"}
SET_KEPT = {"javascript": "let kept = 41", "bash": "kept=41"}
SHOW_KEPT = {"javascript": "kept += 1; console.log(kept)", "bash": "kept=$((kept + 1)); echo $kept"}
INTERRUPTED = {"javascript": ("Interrupted", 1), "bash": ("KeyboardInterrupt", 130)}
RUNTIME = {"javascript": "Node.js v", "bash": "Bash "}
LOOPS = {
    "javascript": [
        "console.log('begun'); for (;;) {}",
        "console.log('begun'); await new Promise(() => {})",
        "await new Promise((r) => setTimeout(r, 1)); console.log('begun'); for (;;) {}",
        "setTimeout(() => { console.log('begun'); for (;;) {} }, 1); await new Promise(() => {})",
        "for (;;) console.log('begun')",
        "console.log('begun'); for (;;) display('x')",
        "console.log('begun'); for (;;) await 1",
        "console.log('begun'); for (;;) { try { for (;;) {} } catch { } finally { } }",
        "console.log('begun'); Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)",
        "console.log('begun'); require('child_process').execSync('sleep 100', { stdio: 'ignore' })",
        "function f() { try { f() } catch { f() } }; console.log('begun'); f()",
    ],
    "bash": [
        "echo begun; while true; do :; done",
        "echo begun; sleep 100",
        "f() { while true; do g; done; }; g() { :; }; echo begun; f",
        "while true; do echo begun; done",
        "echo begun; (while true; do :; done)",
        "echo begun; while true; do x=$(echo a); done",
        "echo begun; yes | cat > /dev/null",
        "echo begun; sleep 100 & wait",
        "eval 'echo begun; for ((;;)); do (:); done'",
        "source /dev/stdin <<< 'echo begun; while :; do :; done; echo no'; echo no",
        "echo begun; bash -c 'while :; do :; done'; echo no",
        "echo begun; read -r x < <(sleep 100)",
    ],
}
# What may be interrupted before it said that it has begun, because it is busy or asleep from then on.
AT_ANY_MOMENT = {"javascript": [0, 1, 4, 5, 6, 7, 8, 9, 10], "bash": range(12)}


@pytest.mark.parametrize("language", BOTH)
def test_it_says_what_it_is_and_is_quiet(open_driver: Open, language: str) -> None:
    """The first word names the runtime, and nothing of the start shows in what a run prints."""
    driver = open_driver(language)
    ran = driver.run(PRINT[language].format("1"))
    assert driver.ready["op"] == "ready"
    assert driver.ready["runtime"].startswith(RUNTIME[language])
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.displays) == (b"1\n", b"", 0, [])


@pytest.mark.parametrize("language", BOTH)
def test_three_hundred_runs(open_driver: Open, language: str) -> None:
    """Each run prints exactly its own, and what one sets the next one finds."""
    driver = open_driver(language)
    driver.run(SET_KEPT[language])
    for number in range(300):
        ran = driver.run(SHOW_KEPT[language])
        assert (ran.stdout, ran.stderr, ran.exit_code) == (b"%d\n" % (42 + number), b"", 0)


@pytest.mark.parametrize(("language", "loop"), [(language, loop) for language in BOTH for loop in LOOPS[language]])
def test_an_interrupt_ends_the_run_and_nothing_else(open_driver: Open, language: str, loop: str) -> None:
    """Whatever a run is doing, an interrupt ends it, and what was known before is known afterwards."""
    driver = open_driver(language)
    driver.run(SET_KEPT[language])
    begin = time.monotonic()
    ran = driver.run(loop, interrupt_at=b"begun\n")
    assert time.monotonic() - begin < 30
    assert (ran.error, ran.exit_code) == INTERRUPTED[language]
    after = driver.run(SHOW_KEPT[language])
    assert (after.stdout.splitlines()[-1], after.stderr, after.exit_code) == (b"42", b"", 0)


@pytest.mark.parametrize("language", BOTH)
def test_many_interrupts_at_any_moment(open_driver: Open, language: str) -> None:
    """Interrupts that come early, late or again leave neither the stream nor the state in disorder."""
    driver = open_driver(language)
    driver.run(SET_KEPT[language])
    for number in range(30):
        choice = AT_ANY_MOMENT[language]
        loop = LOOPS[language][choice[number % len(choice)]]
        ran = driver.run(loop, interrupt_after_s=(number % 5 + 1) / 100)
        assert (ran.error, ran.exit_code) == INTERRUPTED[language], loop
        after = driver.run(SHOW_KEPT[language])
        assert after.stdout.splitlines()[-1] == b"%d" % (42 + number), loop


@pytest.mark.parametrize("loop", LOOPS["bash"][:4])
def test_bash_heeds_a_plain_sigint(open_driver: Open, loop: str) -> None:
    """SIGINT to the group, as a terminal sends it, ends a run too."""
    driver = open_driver("bash")
    driver.run("kept=41")
    driver.stopping = replace(driver.stopping, first=CTRL_C, again=CTRL_C)  # one may come while it starts a program
    assert driver.run(loop, interrupt_at=b"begun\n").error == "KeyboardInterrupt"
    assert driver.run("kept=$((kept + 1)); echo $kept").stdout.splitlines()[-1] == b"42"


@pytest.mark.parametrize("language", BOTH)
def test_an_interrupt_between_runs_is_ignored(open_driver: Open, language: str) -> None:
    """An interrupt that comes too late ends neither the session nor the next run."""
    driver = open_driver(language)
    driver.run(SET_KEPT[language])
    for number in range(20):
        driver.interrupt(CTRL_C if number % 3 == 0 else ())
        if number % 2:
            time.sleep(0.02)
        ran = driver.run(SHOW_KEPT[language])
        assert (ran.stdout, ran.exit_code) == (b"%d\n" % (42 + number), 0)


@pytest.mark.parametrize(
    ("language", "flood"),
    [
        ("javascript", "for (let i = 0; i < 50; i++) process.stdout.write('x'.repeat(100_000))"),
        ("javascript", "process.stderr.write('x'.repeat(5_000_000))"),
        ("bash", "head -c 5000000 /dev/zero | tr '\\0' x"),
        ("bash", "printf '%5000000s' '' | tr ' ' x >&2"),
    ],
)
def test_output_is_complete_before_the_end(open_driver: Open, language: str, flood: str) -> None:
    """Five megabytes are in the pipe when the run is over, and none follow."""
    driver = open_driver(language)
    ran = driver.run(flood)
    assert ran.stdout + ran.stderr == b"x" * 5_000_000
    after = driver.run(PRINT[language].format("1"))
    assert (after.stdout, after.stderr) == (b"1\n", b"")


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("javascript", "const text = `{}`; console.log(text.length)"),
        ("bash", "text='{}'; echo ${{#text}}"),
    ],
)
def test_a_megabyte_of_code(open_driver: Open, language: str, code: str) -> None:
    """Code may be long, and have many lines."""
    text = "line of text\n" * 80_000
    assert open_driver(language).run(code.format(text)).stdout == b"%d\n" % len(text)


@pytest.mark.parametrize(
    ("language", "code", "exit_code"),
    [
        ("javascript", "console.log(1); process.exit(3); console.log(2)", 3),
        ("javascript", "console.log(1); try { process.exit() } finally { console.log(2) }", 0),
        ("javascript", "console.log(1); await 1; process.exit(259)", 3),
        ("javascript", "console.log(1); setTimeout(() => process.exit(3), 1); await new Promise(() => {})", 3),
        ("bash", "echo 1; exit 3; echo 2", 3),
        ("bash", "echo 1; exit 259", 3),
        ("bash", "echo 1; false; exit", 1),
        ("bash", "f() { local kept=1; exit 4; }; echo 1; f; echo 2", 4),
        ("bash", "echo 1; if exit 5; then echo 2; fi", 5),
        ("bash", "source /dev/stdin <<< 'echo 1; exit 6\necho 2'\necho 2", 6),
        ("bash", "echo 1; builtin exit 7; echo 2", 7),
        ("bash", "echo 1; command exit 8; echo 2", 8),
        ("bash", "echo 1; return 9; echo 2", 9),
    ],
)
def test_exit_ends_the_run_alone(open_driver: Open, language: str, code: str, exit_code: int) -> None:
    """The session goes on after an exit, with all it knew."""
    driver = open_driver(language)
    driver.run(SET_KEPT[language])
    ran = driver.run(code)
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.error) == (b"1\n", b"", exit_code, "")
    assert driver.run(SHOW_KEPT[language]).stdout == b"42\n"


@pytest.mark.parametrize(
    ("language", "code"),
    [("javascript", "require('fs').readFileSync(0).length"), ("bash", "read -r line || echo end; cat; wc -c")],
)
def test_standard_input_is_at_its_end(open_driver: Open, language: str, code: str) -> None:
    """What reads from standard input gets nothing, at once, and never the link."""
    ran = open_driver(language).run(code)
    assert ran.exit_code == 0
    assert ran.stdout == (b"" if language == "javascript" else b"end\n0\n")


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("javascript", "const { spawn } = require('child_process'); spawn('sleep', ['30']); 1"),
        ("bash", "sleep 30 &\n{ sleep 0.3; echo late; } &\necho $!"),
    ],
)
def test_background_work_does_not_hold_a_run(open_driver: Open, language: str, code: str) -> None:
    """A run is over while what it started goes on, which outlives an interrupt in Bash too."""
    driver = open_driver(language)
    begin = time.monotonic()
    assert driver.run(code).exit_code == 0
    assert time.monotonic() - begin < 25
    if language == "bash":
        said = driver.run("while :; do :; done", interrupt_after_s=0.01).stdout
        said += driver.run("jobs").stdout
        assert b"sleep 30" in said
        deadline = time.monotonic() + 30
        while b"late\n" not in said:
            assert time.monotonic() < deadline
            said += driver.run("sleep 0.05").stdout


@pytest.mark.parametrize("language", BOTH)
def test_the_end_of_the_link_ends_a_driver_in_a_run(open_driver: Open, language: str) -> None:
    """A driver whose caller is gone ends with 0, once the run lets it or is interrupted."""
    driver = open_driver(language)
    driver.send(LOOPS[language][0])
    time.sleep(0.3)
    driver.link.close()
    deadline = time.monotonic() + 30
    while driver.process.poll() is None and time.monotonic() < deadline:
        driver.interrupt()
        driver.interrupt(CTRL_C)
        time.sleep(0.1)
    assert driver.process.returncode == 0
