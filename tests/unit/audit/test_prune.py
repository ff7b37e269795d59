"""What is kept beside the audit log is removed by age and by size, and the log says so."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from pathlib import Path

import pytest

from cloche.audit import prune as prune_prune
from cloche.audit import writer
from cloche.audit.artifacts import load
from cloche.audit.log import Audit, audit_for
from cloche.audit.prune import CHECK_EVERY_S, Artifact, PruneBounds, chosen_of, prune, prune_when_due
from cloche.audit.redaction import Redactor
from cloche.audit.verify import verify
from cloche.config.keys import Settings
from cloche.config.settings import load_settings
from cloche.core.errors import AuditFailed, InvalidRequest
from tests.harness.audits import cloche as call
from tests.harness.audits import lines_of

NOBODYS = Redactor({}, environ={})
DAY_S = 24 * 3600.0
FEW = PruneBounds(until=float("inf"), most_seen=8, at_once=3)


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    """Give a log that keeps code and output."""
    return Audit(str(tmp_path / "log"), keep=["code", "output"])


def keep(audit: Audit, text: str, *, age_s: float = 0.0) -> str:
    """Keep a text of some age, name it in an event, and return its hash."""
    digest = audit.store("code", text, NOBODYS)
    assert digest is not None
    audit.record("start", code_artifact_sha256=digest)
    then = time.time() - age_s
    os.utime(path_of(audit, digest), (then, then))
    return digest


def path_of(audit: Audit, digest: str) -> Path:
    """Return where a text is kept."""
    return Path(audit.folder) / "audit-artifacts" / digest[:2] / digest


def test_what_is_too_old_goes_and_the_log_says_so(audit: Audit) -> None:
    """The event names it; verify takes it for removed, and all else for missing as before."""
    old, new = keep(audit, "old", age_s=40 * DAY_S), keep(audit, "new", age_s=DAY_S)
    pruned = prune(audit, most_age_s=30 * DAY_S)
    assert (pruned.removed, pruned.removed_bytes, pruned.left, pruned.left_bytes) == (1, 3, 1, 3)
    assert (load(audit.folder, old), load(audit.folder, new)) == (None, b"new")
    event = json.loads(lines_of(Path(audit.folder))[-1])
    assert (event["kind"], event["artifacts"], event["bytes"]) == ("removal", [old], 3)
    found = verify(audit.folder)
    assert (found.is_whole, found.removed) == (True, 1)
    path_of(audit, new).unlink()
    assert "no later event says that it was removed" in str(verify(audit.folder).faults[0])


def test_what_is_too_much_goes_with_the_oldest_first(audit: Audit) -> None:
    """Until the rest is no larger; what is not too much stays."""
    digests = [keep(audit, f"{age}" * 10, age_s=age * 3600) for age in (1, 2, 3)]
    assert prune(audit, most_bytes=20).removed == 1
    assert [load(audit.folder, digest) is None for digest in digests] == [False, False, True]
    assert prune(audit, most_bytes=20).removed == 0


def test_what_comes_again_is_young_and_kept_anew(audit: Audit) -> None:
    """What is in use does not grow old; what was removed and comes again must be there again."""
    digest = keep(audit, "again", age_s=40 * DAY_S)
    audit.store("code", "again", NOBODYS)
    assert prune(audit, most_age_s=DAY_S, most_bytes=1).removed == 0
    os.utime(path_of(audit, digest), (0, 0))
    assert prune(audit, most_age_s=DAY_S).removed == 1
    keep(audit, "again")
    assert verify(audit.folder).is_whole
    path_of(audit, digest).unlink()
    assert verify(audit.folder).fault_count == 1


def test_code_may_be_removed_while_it_runs(audit: Audit) -> None:
    """The end of a run names the code once more, and is no fault then."""
    digest = keep(audit, "long", age_s=DAY_S)
    prune(audit, most_age_s=60)
    audit.record("execution", code_artifact_sha256=digest)
    assert verify(audit.folder).is_whole


def test_nothing_is_removed_that_no_event_names(audit: Audit) -> None:
    """Where the event cannot be written, all stays; a trial writes none."""
    digest = keep(audit, "old", age_s=DAY_S)
    before = lines_of(Path(audit.folder))
    assert prune(audit, most_age_s=60, is_trial=True).removed == 1
    (Path(audit.folder) / "audit.jsonl").chmod(0o644)
    with pytest.raises(AuditFailed, match="chmod 600"):
        prune(audit, most_age_s=60)
    assert load(audit.folder, digest) == b"old"
    assert lines_of(Path(audit.folder)) == before


def test_a_trial_removes_nothing_at_all(audit: Audit) -> None:
    """Not even what a crash left of a write, which goes otherwise without a word."""
    kept = path_of(audit, keep(audit, "new"))
    unfinished = kept.with_name(f".{kept.name}.{'0' * 12}")
    unfinished.write_text("half")
    os.utime(unfinished, (0, 0))
    prune(audit, most_age_s=60, is_trial=True)
    assert unfinished.exists()
    prune(audit, most_age_s=60)
    assert (unfinished.exists(), kept.exists()) == (False, True)


def test_no_link_is_followed_and_nothing_odd_removed(audit: Audit, tmp_path: Path) -> None:
    """Neither a link to a folder nor one to a file, nor what is called by no hash."""
    outside = tmp_path / "outside"
    digest = keep(audit, "old", age_s=DAY_S)
    outside.mkdir()
    precious = outside / ("ab" * 32)
    precious.write_text("precious")
    os.utime(precious, (0, 0))
    place = Path(audit.folder) / "audit-artifacts"
    odd = [place / "ab", path_of(audit, digest).with_name(digest[:2] + "cd" * 31), place / "notes.txt"]
    odd[0].symlink_to(outside)
    odd[1].symlink_to(precious)
    odd[2].write_text("mine")
    pruned = prune(audit, most_age_s=60, most_bytes=1)
    assert pruned.removed == 1
    assert sorted(pruned.odd) == sorted(map(str, odd))
    assert precious.read_text() == "precious"
    assert all(path.is_symlink() or path.exists() for path in odd)


def test_what_has_a_second_name_is_left_alone(audit: Audit, tmp_path: Path) -> None:
    """To remove one of the names would remove nothing, and the log would say that it did."""
    linked = path_of(audit, keep(audit, "linked", age_s=40 * DAY_S))
    os.link(linked, tmp_path / "second")
    pruned = prune(audit, most_age_s=DAY_S)
    assert (pruned.removed, pruned.odd, linked.exists()) == (0, [str(linked)], True)


def test_a_folder_that_is_a_link_is_refused(audit: Audit, tmp_path: Path) -> None:
    """The folder of all that is kept is not followed elsewhere, either."""
    keep(audit, "old", age_s=DAY_S)
    place = Path(audit.folder) / "audit-artifacts"
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuditFailed, match="symbolic link"):
        prune(audit, most_age_s=60)


def test_a_write_that_was_never_finished_goes_in_time(audit: Audit) -> None:
    """What a killed writer left, a day later; no event names it."""
    digest = keep(audit, "new")
    fresh, stale = (path_of(audit, digest).with_name(f".{digest}.{number * 6}") for number in ("ab", "cd"))
    fresh.write_text("")
    stale.write_text("")
    os.utime(stale, (0, 0))
    assert prune(audit, most_age_s=60).odd == []
    assert (fresh.exists(), stale.exists()) == (True, False)


def test_who_keeps_waits_for_who_removes(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither finds a file that the other is about to take away."""
    digest = keep(audit, "shared", age_s=DAY_S)
    place = os.open(Path(audit.folder) / "audit-artifacts", os.O_RDONLY)
    fcntl.flock(place, fcntl.LOCK_EX)
    done = threading.Event()
    keeper = threading.Thread(target=lambda: (audit.store("code", "shared", NOBODYS), done.set()))
    keeper.start()
    assert not done.wait(0.2)
    os.close(place)
    keeper.join(60)
    assert done.is_set()
    assert prune(audit, most_age_s=60).removed == 0
    assert load(audit.folder, digest) == b"shared"
    place = os.open(Path(audit.folder) / "audit-artifacts", os.O_RDONLY)
    fcntl.flock(place, fcntl.LOCK_EX)
    for module in (writer, prune_prune):
        monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.05)
    os.utime(path_of(audit, digest), (0, 0))
    with pytest.raises(AuditFailed, match="lock"):
        audit.store("code", "shared", NOBODYS)
    with pytest.raises(AuditFailed, match="lock"):
        prune(audit, most_age_s=60)
    os.close(place)


def test_many_are_named_in_several_events(audit: Audit) -> None:
    """No event is larger than an event may be, and none of the names is left out."""
    for number in range(150):
        keep(audit, str(number), age_s=DAY_S)
    assert prune(audit, most_age_s=60).removed == 150
    events = [json.loads(line) for line in lines_of(Path(audit.folder))]
    assert [event["count"] for event in events if event["kind"] == "removal"] == [64, 64, 22]
    found = verify(audit.folder)
    assert (found.is_whole, found.removed) == (True, 150)


def test_the_choice() -> None:
    """By age, by size, by both; what came within the last minute never."""
    found = [Artifact(time_ns=int(second * 1e9), digest="", size=10) for second in (0, 100, 200, 299)]

    def chosen(**words: float | int | None) -> int:
        rules = {"most_age_s": None, "most_bytes": None, **words}
        return len(chosen_of(found, now_s=300.0, **rules))  # type: ignore[arg-type]

    assert [chosen(), chosen(most_age_s=250), chosen(most_bytes=25), chosen(most_age_s=250, most_bytes=15)] == [
        0,
        1,
        2,
        3,
    ]
    assert chosen(most_bytes=1) == chosen(most_age_s=1) == 3


def test_what_is_too_old_goes_by_itself_once_an_hour(audit: Audit) -> None:
    """Who keeps something prunes beside that, in any process; the log says so, and nobody waits for it."""
    settings = Settings(
        audit=True,
        audit_folder=audit.folder,
        audit_keep=("code",),
        audit_keep_age_s=30 * DAY_S,
        audit_keep_bytes=1 << 30,
    )
    audit_for.__globals__["_audit_in"].cache_clear()
    stamp = Path(audit.folder) / prune_prune.STAMP
    for is_due in (True, False, True):
        old = keep(audit, f"old {is_due}", age_s=40 * DAY_S)
        if stamp.exists() and is_due:
            os.utime(stamp, (0, time.time() - 2 * prune_prune.PRUNE_EVERY_S))
        ours = audit_for(settings)
        assert ours is not None
        ours._prune_at = 0.0
        new = keep(ours, "new")
        for thread in threading.enumerate():
            if thread.name == prune_prune.THREAD:
                thread.join()
        assert (load(audit.folder, old) is None, load(audit.folder, new)) == (is_due, b"new")
    found = verify(audit.folder)
    assert (found.is_whole, found.removed) == (True, 3)


def test_little_is_done_at_once_until_all_is_done(audit: Audit) -> None:
    """So many files at most are looked at, and fewer are locked; the next one goes on a minute later."""
    for number in range(20):
        keep(audit, f"old {number}", age_s=40 * DAY_S)
    rounds = []
    stamp = Path(audit.folder) / prune_prune.STAMP
    while (pruned := prune_when_due(audit, most_age_s=DAY_S, most_bytes=None, bounds=FEW)) is not None:
        rounds.append((pruned.removed, pruned.is_cut))
        assert prune_when_due(audit, most_age_s=DAY_S, most_bytes=None, bounds=FEW) is None
        os.utime(stamp, (0, time.time() - 2 * CHECK_EVERY_S))
    assert rounds == [(8, True), (8, True), (4, False)]
    events = [json.loads(line) for line in lines_of(Path(audit.folder))]
    assert [event["count"] for event in events if event["kind"] == "removal"] == [3, 3, 2, 3, 3, 2, 3, 1]
    assert verify(audit.folder).is_whole


def test_what_is_too_large_goes_also_where_not_all_is_looked_at(audit: Audit) -> None:
    """What is seen may come to its share; what is one large file may be all of it, and stays."""
    for number in range(400):
        keep(audit, f"{number:0100}", age_s=DAY_S)
    bounds = PruneBounds(until=float("inf"), most_seen=200)
    assert prune(audit, most_bytes=100_000, bounds=bounds).removed == 0
    found = prune(audit, most_bytes=20_000, bounds=bounds)
    assert (found.is_cut, 20 < found.removed < 120) == (True, True)


def test_one_prunes_at_a_time_whichever_process(audit: Audit) -> None:
    """Who comes meanwhile goes on at once; a link in place of what they meet at is refused, and not followed."""
    old, stamp = keep(audit, "old", age_s=40 * DAY_S), Path(audit.folder) / prune_prune.STAMP
    stamp.touch(0o600)
    with open(stamp) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert prune_when_due(audit, most_age_s=DAY_S, most_bytes=None) is None
    stamp.unlink()
    stamp.symlink_to("/dev/null")
    with pytest.raises(AuditFailed, match="symbolic link"):
        prune_when_due(audit, most_age_s=DAY_S, most_bytes=None)
    assert load(audit.folder, old) == b"old"


def test_rules_hold_unless_they_are_switched_off(tmp_path: Path) -> None:
    """Thirty days and a gibibyte; `none` is for ever."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("sandbox: {}\n")
    settings = load_settings({"config": str(mine)})
    assert (settings.audit_keep_age_s, settings.audit_keep_bytes) == (30 * DAY_S, 1 << 30)
    mine.write_text("sandbox: {audit_keep_age: none, audit_keep_size: none}\n")
    settings = load_settings({"config": str(mine)})
    assert (settings.audit_keep_age_s, settings.audit_keep_bytes) == (None, None)


def test_the_command_prunes_by_options_and_by_configuration(audit: Audit, tmp_path: Path) -> None:
    """Options win; a key that makes no sense is named with its file; without a rule nothing is removed."""
    old, older = keep(audit, "old", age_s=2 * DAY_S), keep(audit, "older", age_s=4 * DAY_S)
    words = ("audit", "prune", "--yes", "--folder", audit.folder)
    empty = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "none")}
    refused = call(*words, CLOCHE_AUDIT_KEEP_AGE="none", CLOCHE_AUDIT_KEEP_SIZE="none", **empty)
    assert (refused.returncode, "--older-than" in refused.stderr, "audit_keep_age" in refused.stderr) == (2, True, True)
    assert call(*words, "--dry-run", CLOCHE_AUDIT_KEEP_AGE="3d", **empty).stdout.startswith("1 (5B) would be removed")
    assert call(*words, CLOCHE_AUDIT_KEEP_AGE="3d", **empty).stdout == "1 (5B) removed, 1 (3B) left\n"
    assert (load(audit.folder, old), load(audit.folder, older)) == (b"old", None)
    told = call(*words, "--older-than", "1d", "--json", CLOCHE_AUDIT_KEEP_AGE="3d", **empty)
    assert (told.returncode, json.loads(told.stdout)["removed"]) == (0, 1)
    checked = call("audit", "verify", "--folder", audit.folder, **empty)
    assert (checked.returncode, "2 of what was kept beside the log were removed" in checked.stdout) == (0, True)


@pytest.mark.parametrize(
    ("key", "value"), [("audit_keep_age", "soon"), ("audit_keep_size", "0"), ("audit_keep_age", "-1d")]
)
def test_a_wrong_rule_is_named_with_file_and_key(key: str, value: str, tmp_path: Path) -> None:
    """So is one that a file of the working directory wants to set."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"sandbox: {{{key}: {value}}}\n")
    with pytest.raises(InvalidRequest, match=rf"mine\.yaml: sandbox\.{key}"):
        load_settings({"config": str(mine)})
    mine.write_text("sandbox: {audit_keep_age: 30d, audit_keep_size: 1g}\n")
    settings = load_settings({"config": str(mine)})
    assert (settings.audit_keep_age_s, settings.audit_keep_bytes) == (30 * DAY_S, 1 << 30)
