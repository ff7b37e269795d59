"""What backends on other machines share: accounts, claims, sentences, and the counters of quotas."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cloche.backends.cloche.connections import begin, outcome
from cloche.backends.cloche.fields import MOST_OUTPUT, limits_of
from cloche.backends.cloche.wire import Wire, read_json
from cloche.backends.remote.accounts import check_account
from cloche.backends.remote.claims import check_claims, claimed_controls, claimed_enforcement
from cloche.backends.remote.failures import Failure, by_status, remote_error, scrub
from cloche.backends.remote.quota import Counter, counter_for
from cloche.core.enforcement import Control, Level, State
from cloche.core.errors import BackendUnavailable, NodeLost
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.remote import LOOKS, HiddenText, LeasedPlace, Quota, RemoteAccount
from tests.harness.virtual_loop import run_virtually

KEY = "e2b_0123456789abcdef0123"
ASKED = {"provider": "e2b", "package": "json", "extra": "e2b", "variable": "E2B_API_KEY"}
MIDNIGHT = 1_800_000_000.0 // 86400 * 86400


def account_with(tmp_path: Path, **quota: float) -> RemoteAccount:
    """Return an account with such a quota."""
    return RemoteAccount(
        provider="e2b", api_key=HiddenText(KEY), quota=Quota(**quota),  # type: ignore[arg-type]
        quota_file=str(tmp_path / "below" / "quota.db"),
    )  # fmt: skip


def test_the_key_is_in_no_text_of_an_account() -> None:
    """Its repr, its name and what the audit log says have none of it, and two keys have two names."""
    one = RemoteAccount(provider="e2b", api_key=HiddenText(KEY), url="https://api.example.test:8443/v1")
    texts = [repr(one), one.id, str(one.as_dict()), f"{one.api_key}", repr(one.api_key)]
    assert not [text for text in texts if KEY in text or KEY[4:] in text]
    assert one.host == "api.example.test:8443"
    assert one.id != RemoteAccount(provider="e2b", api_key=HiddenText(f"{KEY}0")).id


@pytest.mark.parametrize(
    ("account", "wanted"),
    [
        (None, "E2B_API_KEY"),
        (RemoteAccount(provider="e2b"), "E2B_API_KEY"),
        (RemoteAccount(provider="e2b", api_key=HiddenText(KEY), url="http://example.test"), "https"),
        (RemoteAccount(provider="e2b", api_key=HiddenText(KEY), url="https://me:s3cr3t@example.test"), "a user name"),
        (RemoteAccount(provider="e2b", api_key=HiddenText(KEY), sandbox_url="https://[::1"), "not an address"),
        (RemoteAccount(provider="e2b", api_key=HiddenText(KEY), domain="a/b"), "HOST:PORT"),
        (RemoteAccount(provider="e2b", api_key=HiddenText(KEY), ca_file="/none/here.pem"), "/none/here.pem"),
    ],
)
def test_what_an_account_lacks_is_said_before_anybody_is_asked(account: RemoteAccount | None, wanted: str) -> None:
    """Each error names what is wrong and what to do, and no key."""
    with pytest.raises(BackendUnavailable, match=wanted) as caught:
        check_account(account, **ASKED)
    assert KEY not in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    """What is not installed is said with what installs it."""
    with pytest.raises(BackendUnavailable, match=r"cloche\[e2b\]"):
        check_account(RemoteAccount(provider="e2b", api_key=HiddenText(KEY)), **{**ASKED, "package": "no_such_package"})


@pytest.mark.parametrize("url", ["https://example.test", "http://127.0.0.1:3000", "http://localhost:3000", ""])
def test_plain_http_is_for_this_host_alone(url: str) -> None:
    """These addresses do; the others are above."""
    account = RemoteAccount(provider="e2b", api_key=HiddenText(KEY), url=url)
    assert check_account(account, **ASKED) is account


def refusal(policy: Policy) -> str:
    """Return why a provider that claims all does not do for a policy."""
    enforcement = claimed_enforcement(Level.VM, claimed_controls("E2B"))
    try:
        check_claims(policy, enforcement, backend="e2b", networks=("off",), network="", level="E2B gives")
    except BackendUnavailable as error:
        return str(error)
    return ""


def test_what_is_claimed_does_for_a_tier_and_not_for_require() -> None:
    """A required level or control has to be measured, unless the caller accepts claims; time is ours."""
    assert refusal(Policy()) == ""
    assert refusal(Policy(require_level=Level.JAIL, accept_claimed_level=True)) == ""
    assert "only claimed" in refusal(Policy(require_level=Level.JAIL))
    assert "memory is required but would be claimed" in refusal(
        Policy(require_controls=(Control.MEMORY,), accept_claimed_level=True)
    )
    assert refusal(Policy(require_level=Level.VM, require_controls=tuple(Control), accept_claimed=True)) == ""
    assert refusal(Policy(require_controls=(Control.TIME, Control.OUTPUT))) == ""
    controls = claimed_controls("E2B")
    assert {controls[control].state for control in Control} == {State.CLAIMED, State.ENFORCED}
    assert controls[Control.FILESYSTEM].mechanism == "claimed by E2B"


def test_each_failure_is_a_sentence_of_its_own(tmp_path: Path) -> None:
    """No two are alike, each has a remedy, and a provider's words come without the key and without an end."""
    account = account_with(tmp_path)
    said = {str(remote_error("e2b", one, account=account)) for one in Failure}
    assert len(said) == len(Failure)
    long = remote_error("e2b", Failure.SERVER, detail=f"{KEY} \x1b[31m\n{'x' * 10_000}", status=500, account=account)
    assert KEY not in str(long)
    assert "\x1b" not in str(long)
    assert len(str(long)) < 1000
    limited = remote_error("e2b", Failure.RATE_LIMITED, status=429, retry_after_s=7)
    assert limited.retry_after_s == 7
    assert "7 s" in limited.remedy
    assert remote_error("e2b", Failure.RATE_LIMITED, retry_after_s=float("nan")).retry_after_s is None
    assert [by_status(code) for code in (401, 403, 418, 429, 500, 504)] == [
        Failure.UNAUTHORIZED, Failure.FORBIDDEN, Failure.BAD_ANSWER, Failure.RATE_LIMITED, Failure.SERVER,
        Failure.TIMEOUT,
    ]  # fmt: skip
    assert KEY[:12] not in scrub(f"{'y' * 1190}{KEY}", account)
    place = LeasedPlace(engine="ray", node="n", lease="l", credential=HiddenText(f"{'p' * 200}.{'s' * 86}"))
    assert "s" * 43 not in scrub(f"a node that repeats {place.credential.reveal()}", replace(account, place=place))


def test_nothing_is_counted_where_nothing_is_limited(tmp_path: Path) -> None:
    """Without a quota there is no file."""
    assert counter_for(account_with(tmp_path)) is None
    assert counter_for(account_with(tmp_path, runs_per_day=1)) is not None
    with pytest.raises(BackendUnavailable, match="no home folder"):
        counter_for(replace(account_with(tmp_path, runs_per_day=1), quota_file=None))


def test_what_is_reserved_is_settled_to_what_it_came_to(tmp_path: Path) -> None:
    """Seconds and runs count before the call; afterwards what they were; a day later from the beginning."""
    now = [MIDNIGHT + 60]
    counter = Counter(account_with(tmp_path, runs_per_day=3, seconds_per_day=100), lambda: now[0])
    first = counter.begin_run(60)
    with pytest.raises(BackendUnavailable, match=r"60 of 100 seconds.*40 are left, and 60 are needed.*resets at"):
        counter.begin_run(60)
    first.settle(1.5)
    second = counter.begin_run(60)
    second.refund()
    assert counter.used_today() == {"runs": 1, "seconds": 1.5, "sandboxes": 0, "money": 0}
    counter.begin_run(1)
    counter.begin_run(1)
    with pytest.raises(BackendUnavailable, match="3 of 3 runs"):
        counter.begin_run(1)
    now[0] += 86400
    counter.begin_run(60)


def test_sandboxes_at_once_are_places_that_come_back(tmp_path: Path) -> None:
    """By the end of the sandbox, by the provider's own end of it, and by its name, as gc knows it."""
    now = [MIDNIGHT]
    counter = Counter(account_with(tmp_path, sandboxes_at_once=2, sandboxes_per_day=5), lambda: now[0])
    first, second = counter.open_sandbox(600), counter.open_sandbox(600)
    with pytest.raises(BackendUnavailable, match="2 of 2 sandboxes at once"):
        counter.open_sandbox(600)
    first.close()
    second.note_id("sb1")
    counter.open_sandbox(600).refund()
    third = counter.open_sandbox(1200)
    counter.forget_sandbox("sb1")
    counter.open_sandbox(10)
    now[0] += 700
    counter.open_sandbox(10)
    third.close()
    with pytest.raises(BackendUnavailable, match="5 of 5 sandboxes for today"):
        counter.open_sandbox(10)


def test_money_stops_what_comes_next(tmp_path: Path) -> None:
    """What a run costs is known when it is over, so the next one is refused."""
    counter = Counter(account_with(tmp_path, money_per_day=1.0), lambda: MIDNIGHT)
    counter.begin_run(1).settle(1, cost=1.2)
    with pytest.raises(BackendUnavailable, match="money"):
        counter.begin_run(1)


def test_processes_at_once_never_use_more_than_there_is(tmp_path: Path) -> None:
    """Sixteen connections ask for a hundred runs of fifty."""
    account = account_with(tmp_path, runs_per_day=50)

    def ask(_: int) -> int:
        with suppress(BackendUnavailable):
            Counter(account, lambda: MIDNIGHT).begin_run(1)
            return 1
        return 0

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(ask, range(100))) == 50


def test_a_damaged_file_stops_runs_and_loses_nothing(tmp_path: Path) -> None:
    """What cannot be counted does not run; the file is left as it is, and only its owner reads it."""
    account = account_with(tmp_path, runs_per_day=2)
    counter = Counter(account)
    counter.begin_run(1)
    file = Path(account.quota_file or "")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(b"no database" * 1000)
    with pytest.raises(BackendUnavailable, match="cannot be counted"):
        counter.begin_run(1)
    assert file.read_bytes().startswith(b"no database")
    with suppress(sqlite3.Error):
        file.unlink()


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -100.0, 10**400, "5", True, None])
def test_a_cost_that_is_no_amount_changes_nothing(tmp_path: Path, cost: object) -> None:
    """A provider can neither use up a quota by a word, nor give it back."""
    counter = Counter(account_with(tmp_path, money_per_day=5, seconds_per_day=100))
    counter.begin_run(10).settle(4, 2.0)
    counter.begin_run(10).settle(1, cost)
    counter.open_sandbox(60).close(cost)
    assert counter.used_today() == {"runs": 2, "seconds": 5.0, "sandboxes": 1, "money": 2.0}


def test_what_ran_is_not_lost_where_it_cannot_be_counted(tmp_path: Path) -> None:
    """Only what comes before a run may stop it; after it the reservation stays."""
    account = account_with(tmp_path, runs_per_day=5)
    counter = Counter(account)
    run, place = counter.begin_run(10), counter.open_sandbox(60)
    file = Path(account.quota_file or "")
    file.rename(file.with_suffix(".kept"))
    file.mkdir()
    run.settle(1)
    run.refund()
    place.note_id("one")
    place.close()
    file.rmdir()
    file.with_suffix(".kept").rename(file)
    assert counter.used_today()["runs"] == 1


@pytest.mark.parametrize("number", ["1" * 4_299, "2." + "3" * 700, "1e999", "NaN"])
def test_a_service_keeps_nobody_by_numbers(number: str) -> None:
    """A long number takes the square of its digits, with the interpreter's lock: many of them are no answer."""
    begun = time.process_time()
    with pytest.raises(ValueError, match=r"integer|number|JSON"):
        read_json(f"[{','.join([number] * 3_000)}]".encode())
    assert time.process_time() - begun < 1
    assert read_json(f"[{'1' * 4_000}, 0.1]".encode()) == [int("1" * 4_000), 0.1]


def test_a_service_does_not_say_how_much_is_held_here() -> None:
    """The limits that it reports are shown; invalid ones, and those of the caller's own memory and disk, are not."""
    asked = Limits(disk_bytes=100 << 20)
    limits = limits_of({"pids": 7, "outputBytes": 1 << 50, "diskBytes": 1 << 50, "timeoutS": 99.5}, asked)
    assert (limits.pids, limits.timeout_s) == (7, 99.5)
    assert (limits.output_bytes, limits.disk_bytes) == (MOST_OUTPUT, asked.disk_bytes)
    assert limits_of({"outputBytes": 1 << 20}, asked).output_bytes == 1 << 20
    for wrong in (-1, 10**400, 1e300, float("nan")):
        assert limits_of({"pids": wrong}, asked) == asked, wrong


def test_a_node_is_looked_after_more_often_than_a_service() -> None:
    """A call to a node that was cut off ends within 5 s, though a service may be silent for longer."""
    place = LeasedPlace(engine="ray", node="n", lease="l", credential=HiddenText())
    assert RemoteAccount(provider="ray", place=place).look_s * LOOKS < 5
    assert RemoteAccount(provider="ray", place=place, silence_s=2.0).look_s * LOOKS == pytest.approx(2.0)
    assert RemoteAccount(provider="cloche").look_s * LOOKS == pytest.approx(10.0)


def test_the_reason_of_a_lost_node_does_not_delay_its_error() -> None:
    """A node that was cut off is an error within 5 s, whatever the fleet says; one that ended waits for its reason.

    So does a call that begins when the connection has just ended.
    """

    async def lose(why: str, after_s: float, how: str) -> tuple[str, float]:
        async def why_lost(wait_s: float) -> str:
            await asyncio.sleep(min(after_s, wait_s))
            return why if after_s < wait_s else ""

        place = LeasedPlace(engine="ray", node="n", lease="l", credential=HiddenText(), why_lost=why_lost)
        account = RemoteAccount(provider="ray", place=place)
        wire, loop = Wire(account), asyncio.get_running_loop()  # without a socket nothing is answered
        if how == "closed before":
            wire.lose(Failure.NO_NETWORK, "it was closed")
        call, began = await wire.begin("run", {}), loop.time()
        if how == "closed":
            wire.lose(Failure.NO_NETWORK, "it was closed")
        with pytest.raises(NodeLost) as lost:
            await outcome(call, account, "code ran", timeout_s=None)
        return str(lost.value), loop.time() - began

    message, seconds = run_virtually(lose("evicted", 60.0, "cut"))
    assert "nothing was heard" in message
    assert seconds <= 5.0
    for how in ("closed", "closed before"):
        message, seconds = run_virtually(lose("OOMKilled", 3.0, how))
        assert "OOMKilled" in message
        assert seconds == pytest.approx(3.0)


def test_a_node_that_the_fleet_has_lost_is_not_waited_for() -> None:
    """A call to a machine that accepts connections and says nothing ends as soon as the fleet knows better."""

    async def begin_lost() -> float:
        async def why_lost(wait_s: float) -> str:
            return "evicted" if wait_s else ""

        place = LeasedPlace(engine="ray", node="n", lease="l", credential=HiddenText(), why_lost=why_lost)
        with socket.create_server(("127.0.0.1", 0)) as server:  # its kernel accepts
            account = RemoteAccount(
                provider="ray", url=f"https://127.0.0.1:{server.getsockname()[1]}", certificate="c" * 64, place=place,
                silence_s=60.0,
            )  # fmt: skip
            began = time.monotonic()
            with pytest.raises(NodeLost, match="evicted"):
                await begin(account, "run", {})
            return time.monotonic() - began

    assert asyncio.run(begin_lost()) < 20
