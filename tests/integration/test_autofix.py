"""Auto-fix over the real protocol: the `httpx` client, a server on loopback, real sandboxes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.autofix.endpoint import HIDDEN, Endpoint, ModelFailed
from cloche.autofix.loop import AutoFix
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.fixing import FixAnswering, FixEvent
from cloche.core.result import FixReport, FixStop, Result
from tests.harness.models import ESCAPES, KEY, MODEL, Answer, Handler, Reply, Scripted, block, serving

pytestmark = pytest.mark.usefixtures("settings_of_nobody")

RIGHT = "print(6 * 7)\n"


@pytest.fixture(autouse=True)
def _settings(no_variables: None) -> None:
    """Keep this machine's keys and proxies out."""


def endpoint(server: Scripted, **options: Any) -> Endpoint:
    """Return the endpoint of a server, that is tried again without a wait."""
    return Endpoint(server.base_url, MODEL, **{"api_key": KEY, "retry_wait_s": 0.001, **options})


def fix(server: Scripted, code: str, **options: Any) -> tuple[Result, FixReport]:
    """Run a program with auto-fix by a server."""
    own = {
        name: options.pop(name) for name in ("max_rounds", "token_budget", "time_budget", "on_event") if name in options
    }
    result = cloche.run(code, autofix=AutoFix(endpoint(server), **own), **options)
    assert result.fix is not None
    return result, result.fix


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Hold a program that fails, the model's script, and what the right one prints."""

    code: str
    script: tuple[Answer, ...]
    prints: str
    language: str = "python"
    first: str  # a word of its first failure
    limits: tuple[tuple[str, Any], ...] = ()


BROKEN = {
    "a wrong name": Broken(
        code="values = [1, 2, 3]\nprint(sum(value))\n",
        script=(block("values = [1, 2, 3]\nprint(sum(values))\n"),),
        prints="6\n",
        first="NameError",
    ),
    "a syntax error": Broken(
        code="for n in range(3)\n    print(n)\n",
        script=(block("for n in range(3):\n    print(n)\n", ""),),
        prints="0\n1\n2\n",
        first="SyntaxError",
    ),
    "two mistakes, one after the other": Broken(
        code="import math\nprint(math.sqroot(-4))\n",
        script=(block("import math\nprint(math.sqrt(-4))\n"), block("import cmath\nprint(cmath.sqrt(-4))\n")),
        prints="2j\n",
        first="AttributeError",
    ),
    "an endless loop": Broken(
        code="import time\nn = 3\nwhile n > 0:\n    time.sleep(1)\nprint(n)\n",
        script=(block("n = 3\nwhile n > 0:\n    n -= 1\nprint(n)\n"),),
        prints="0\n",
        first="Execution timed out",
        limits=(("timeout", 10),),
    ),
    "too much memory": Broken(
        code="data = bytearray(1 << 30)\nprint(len(data))\n",
        script=(block("print(1 << 30)\n"),),
        prints=f"{1 << 30}\n",
        first="",
        limits=(("memory", "64m"),),
    ),
    "a package that is not here": Broken(
        code="import no_such_package\nprint(no_such_package.mean([2, 4]))\n",
        script=(block("from statistics import mean\nprint(mean([2, 4]))\n", "py"),),
        prints="3\n",
        first="ModuleNotFoundError",
    ),
    "a test that fails": Broken(
        code="def double(x):\n    return x + 2\n\n\nassert double(3) == 6, double(3)\nprint('passed')\n",
        script=("```diff\n@@ -1,2 +1,2 @@\n def double(x):\n-    return x + 2\n+    return x * 2\n```\n",),
        prints="passed\n",
        first="AssertionError",
    ),
    "an exit without a word": Broken(
        code="import sys\nsys.exit(3)\n",
        script=(json.dumps({"explanation": "it exits", "code": "print('done')\n"}),),
        prints="done\n",
        first="",
    ),
    "a script of the shell": Broken(
        code='set -e\nfor name in a b; do echo "$name"; done\nfalse\n',
        script=(block('set -e\nfor name in a b; do echo "$name"; done\n', "sh"),),
        prints="a\nb\n",
        language="bash",
        first="",
    ),
    "a program of JavaScript": Broken(
        code="const words = ['a', 'b'];\nconsole.log(word.join('-'));\n",
        script=(block("const words = ['a', 'b'];\nconsole.log(words.join('-'));\n", "js"),),
        prints="a-b\n",
        language="javascript",
        first="ReferenceError",
        limits=(("memory", "512m"),),
    ),
}


@pytest.mark.toolchain
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_program_is_repaired(broken: Broken) -> None:
    """Each of these fails by itself, and ends well after as many rounds as the model takes."""
    with serving(broken.script) as server:
        result, report = fix(server, broken.code, language=broken.language, **dict(broken.limits))
        prompts = [asked.prompt for asked in server.asked]
    assert report.first is not None
    assert not report.first.ok
    assert broken.first in report.first.stderr
    assert (result.stdout, report.stop, report.ok) == (broken.prints, FixStop.FIXED, True), report.message
    assert len(report.rounds) == len(broken.script) == len(prompts)
    assert f"\n\nCode:\n{broken.code}" in prompts[0]
    assert prompts[0].startswith("Fix this error: ")
    assert broken.first in prompts[0]
    assert report.diff.startswith("--- before\n+++ after\n@@ ")
    assert (report.model, report.host) == (MODEL, server.host)


def _endless(handler: Handler) -> None:
    """Stream without end."""
    handler.begin("text/event-stream")
    choice = {"index": 0, "delta": {"content": "print(1)\n" * 4000}, "finish_reason": None}
    for _ in range(100_000):
        handler.send_event({**handler.head("chat.completion.chunk"), "choices": [choice]})


def _packed(handler: Handler) -> None:
    """Claim that the answer is packed."""
    handler.begin("application/json", {"Content-Encoding": "gzip"})


def _elsewhere(handler: Handler) -> None:
    """Send the question on to another host."""
    handler.send_json({}, 307, {"Location": "http://127.0.0.1:9/v1/chat/completions"})


def _nonsense(handler: Handler) -> None:
    """Answer with JSON of the wrong shapes."""
    handler.send_json(
        {"choices": [{"message": {"content": {"a": 1}}, "finish_reason": 7}], "usage": {"total_tokens": -5}}
    )


def _hang_up(handler: Handler) -> None:
    """Answer nothing at all."""
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


WIDER = json.dumps({"code": "open('/proc/self/status').read(); 1/0 # b", "network": "open", "timeout": 999})
HOSTILE: dict[str, tuple[tuple[Answer, ...], FixStop]] = {
    "prose": (("I am sorry, I cannot help with that.",), FixStop.NO_CODE),
    "nothing": (("",), FixStop.NO_CODE),
    "the same program": ((block("print(1 / 0)\n"),), FixStop.UNCHANGED_CODE),
    "the same error": ((block("# better\n\nprint(1 / 0)\n"),), FixStop.SAME_ERROR),
    "another language": ((block("rm -rf --no-preserve-root /\n", "bash"),), FixStop.NO_CODE),
    "another error each time": (
        tuple(block(f"raise RuntimeError({'x' * n!r})\n") for n in range(1, 9)),
        FixStop.MAX_ROUNDS,
    ),
    "text without end": ((_endless,), FixStop.TOKEN_BUDGET),
    "an answer that was cut": ((Reply(text=block("print(1)\n"), finish_reason="length"),), FixStop.NO_CODE),
    "a wish for more rights": ((WIDER, WIDER), FixStop.UNCHANGED_CODE),
    "codes for the terminal": ((f"{ESCAPES}no", ""), FixStop.NO_CODE),
    "JSON of wrong shapes": ((_nonsense,), FixStop.NO_CODE),
    "a redirect": ((_elsewhere,), FixStop.MODEL_ERROR),
    "a packed answer": ((_packed,), FixStop.MODEL_ERROR),
    "a refused key": ((Reply(status=401, text=f"wrong key {KEY}"),), FixStop.MODEL_ERROR),
    "an error of the server's": ((Reply(status=500, text="oops"),) * 9, FixStop.MODEL_ERROR),
    "tokens beyond any budget": (
        (Reply(text=block("raise KeyError\n"), usage={"total_tokens": 10**9}),),
        FixStop.TOKEN_BUDGET,
    ),
}


@pytest.mark.parametrize(("script", "stop"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_or_useless_answer_ends_it(script: tuple[Answer, ...], stop: FixStop) -> None:
    """Auto-fix stops for the right reason, the program's own failure stands, and nothing of it was let out."""
    with serving(script) as server:
        result, report = fix(server, "print(1 / 0)\n")
    assert report.stop is stop, report.message
    assert not report.ok
    assert (result.exit_code, result.ok) == (1, False)
    assert report.message
    assert KEY not in json.dumps(result.as_dict())


def test_an_answer_stays_in_the_sandbox() -> None:
    """What a model writes meets the same walls: no network, no file of the host's, no more time."""
    hostile = (
        "import socket, os, pathlib\n"
        "found = {}\n"
        "try: socket.create_connection(('127.0.0.1', PORT), 2); found['network'] = True\n"
        "except OSError: pass\n"
        "found['home'] = pathlib.Path(HOME).exists()\n"
        "found['key'] = [k for k in os.environ if 'KEY' in k]\n"
        "print(found)\n"
    )
    with serving([]) as server:
        port, home = server.server_address[1], str(Path(__file__))
        code = hostile.replace("PORT", str(port)).replace("HOME", repr(home))
        outside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert outside.stdout == "{'network': True, 'home': True, 'key': []}\n"
        server.script([block(code)])
        result, report = fix(server, "print(1 / 0)\n")
    assert report.ok
    assert result.stdout == "{'home': False, 'key': []}\n"


@pytest.mark.parametrize("refuses", ["", "loudly", "quietly"])
def test_streams_are_used_where_there_are_any(refuses: str) -> None:
    """A stream is asked for first; an endpoint that has none is asked for the whole."""
    heard: list[FixEvent] = []
    with serving([block(RIGHT)], refuses_streams=refuses) as server:
        _, report = fix(server, "print(", on_event=heard.append)
        asked = server.asked
    assert report.ok
    sizes = [event.chars for event in heard if isinstance(event, FixAnswering)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(block(RIGHT))
    assert (len(sizes) > 3) == (refuses == "")
    assert asked[0].body["stream"] is True
    assert asked[-1].body.get("stream", False) is (refuses != "loudly")
    assert asked[0].headers["Authorization"] == f"Bearer {KEY}"
    assert all(one.path == "/v1/chat/completions" for one in asked)


@pytest.mark.parametrize(
    "first",
    [Reply(status=429, text="slowly"), Reply(status=503, text="busy", headers={"Retry-After": "0"}),
     Reply(text=block(RIGHT), breaks_off=True), _hang_up],
    ids=["too many", "busy", "broken off", "hung up"],
)  # fmt: skip
def test_what_may_work_the_next_time_is_tried_again(first: Answer) -> None:
    """An endpoint that is busy, or breaks off, is asked again, and only the whole answer counts."""
    with serving([first, block(RIGHT)]) as server:
        result, report = fix(server, "print(")
        assert len(server.asked) == 2
    assert (result.stdout, report.ok, len(report.rounds)) == ("42\n", True, 1)


def test_what_never_works_is_given_up() -> None:
    """After a few tries the message says which host, what it said, and how often it was asked."""
    with serving([Reply(status=503, text="down")] * 9) as server:
        _, report = fix(server, "print(")
        assert len(server.asked) == 4
    assert report.stop is FixStop.MODEL_ERROR
    assert server.host in report.message
    assert "503" in report.message
    assert "4 times" in report.message
    gone, report = fix(server, "print(")  # nobody listens there any more
    assert report.stop is FixStop.MODEL_ERROR
    assert "cannot be reached" in report.message
    assert gone.exit_code == 1


def test_a_slow_endpoint_costs_the_time_budget_at_most() -> None:
    """An answer that drips is not waited for beyond the budget."""

    def drip(handler: Handler) -> None:
        handler.begin("text/event-stream")
        while True:
            handler.send_chunk(b": still here\n\n")
            time.sleep(0.02)

    with serving([drip]) as server:
        _, report = fix(server, "print(", time_budget=0.4)
    assert report.stop in (FixStop.MODEL_ERROR, FixStop.TIME_BUDGET)  # a slow machine may not get to ask
    assert "time budget" in report.message


def test_tokens_that_an_endpoint_counts_are_counted() -> None:
    """The larger of what it says and what we see: a false zero saves nothing, and no claim is beyond all budgets."""
    for usage, least in (
        ({"total_tokens": 5000}, 5000),
        ({"total_tokens": 0}, 100),
        ({"total_tokens": "many"}, 100),
        ({"total_tokens": -(10**9)}, 100),
        ({"total_tokens": True}, 100),
        ({"total_tokens": 10**400}, 1 << 31),
    ):
        with serving([Reply(text=block(RIGHT), usage=usage)]) as server:
            _, report = fix(server, "print(")
        assert report.tokens >= least
        assert report.tokens < least + 1000


def test_what_is_no_answer_is_paid_for_and_counted() -> None:
    """Thoughts, once where an endpoint sends them under two names; and an answer that broke off before another one."""
    with serving([Reply(text=block(RIGHT), thoughts="hm " * 1000)]) as server:
        _, report = fix(server, "print(")
    assert report.stop is FixStop.FIXED
    assert 1000 < report.tokens < 1600
    with serving([Reply(text="hm " * 1000, breaks_off=True), block(RIGHT)]) as server:
        _, report = fix(server, "print(")
    assert report.stop is FixStop.FIXED
    assert 700 < report.tokens < 2500


@pytest.mark.parametrize("usage", [{"total_tokens": 1}, None])
def test_an_answer_that_goes_beyond_the_budget_is_broken_off(usage: object) -> None:
    """By our own count, whatever the endpoint claims; what came is counted, and nothing of it runs."""
    with serving([Reply(text="never ending " * 20_000, usage=usage), block(RIGHT)]) as server:
        _, report = fix(server, "print(", token_budget=2000)
        assert len(server.asked) == 1
    assert report.stop is FixStop.TOKEN_BUDGET
    assert "more than the" in report.message
    assert 1500 < report.tokens < 4000


def test_an_answer_that_is_too_long_is_none_however_large_the_budget() -> None:
    """What no program needs is not read to its end."""
    with serving([_endless]) as server:
        _, report = fix(server, "print(", token_budget=10**6)
    assert report.stop is FixStop.NO_CODE


def test_the_key_is_nowhere() -> None:
    """Neither a repr, nor a report, nor an error shows it, even where the endpoint says it aloud."""
    aloud = f"Your key is {KEY}\n```python\nprint('{KEY}')\n```"
    with serving([aloud, *[Reply(status=400, text=f"bad {KEY}")] * 3]) as server:
        result, report = fix(server, "print(")
        assert KEY not in repr(endpoint(server))
        _, refused = fix(server, "print(")
    assert KEY not in json.dumps(result.as_dict())
    assert result.stdout == f"{HIDDEN}\n"
    assert report.ok
    assert KEY not in refused.message
    assert HIDDEN in refused.message


@pytest.mark.parametrize("odd", [f"{KEY}\0x", f"{KEY}\n{KEY}", f"{KEY}é"], ids=["NUL", "two lines", "no ASCII"])
def test_a_key_that_no_header_takes_is_refused_and_not_repeated(odd: str) -> None:
    """The HTTP library would say it aloud, with escapes that hide it from whoever strikes it out."""
    with pytest.raises(InvalidRequest, match=r"autofix\.api_key") as caught:
        Endpoint("http://localhost/v1", MODEL, api_key=odd)
    assert KEY not in str(caught.value)


def test_a_key_that_ends_with_a_newline_works() -> None:
    """So a file's text is, which many a variable is set from."""
    with serving([block(RIGHT)]) as server:
        assert asyncio.run(_ask_all(endpoint(server, api_key=f"{KEY}\n"), 1)) == [block(RIGHT)]
        assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"


async def _ask_all(asked: Endpoint, count: int) -> list[str]:
    replies = await asyncio.gather(*(asked.ask("x", timeout_s=30, heard=lambda _: None) for _ in range(count)))
    return [reply.text for reply in replies]


def test_many_who_ask_at_once_find_the_way_each() -> None:
    """An endpoint without streams refuses all of them; each is asked for the whole, whatever the others found."""
    with serving([block(RIGHT)] * 7, refuses_streams="loudly") as server:
        one = endpoint(server)
        assert asyncio.run(_ask_all(one, 6)) == [block(RIGHT)] * 6
        refused = len(server.asked)
        assert asyncio.run(_ask_all(one, 1)) == [block(RIGHT)]
        assert len(server.asked) == refused + 1


@pytest.mark.parametrize(("key", "told"), [("", "no key is set; set autofix.api_key"), (KEY, "check the key (autofix")])
def test_a_refused_key_says_what_to_set(key: str, told: str) -> None:
    """Whoever reads the message knows which setting it is about."""
    with serving([Reply(status=401, text="who are you")]) as server, pytest.raises(ModelFailed, match=re.escape(told)):
        asyncio.run(_ask_all(endpoint(server, api_key=key), 1))


def test_settings_name_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File and environment say whom to ask; the key of OpenAI's own variable goes to no other host."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-another")
    with serving([block(RIGHT)] * 2) as server:
        section = {"base_url": server.base_url, "model": "from-the-file", "max_rounds": 2}
        (tmp_path / "mine.json").write_text(json.dumps({"autofix": section}))
        fixer = AutoFix(config=tmp_path / "mine.json")
        assert (fixer.max_rounds, fixer.model, fixer.host) == (2, "from-the-file", server.host)
        assert cloche.run("print(", autofix=fixer).ok
        assert "of-another" not in str(server.asked[0].headers)
        sent = {name.lower() for name in server.asked[0].headers}
        assert not [name for name in sent if name.startswith(("authorization", "openai", "x-stainless-os"))]
        monkeypatch.setenv("CLOCHE_AUTOFIX_API_KEY", KEY)
        monkeypatch.setenv("CLOCHE_AUTOFIX_MODEL", "from-the-environment")
        assert cloche.run("print(", autofix=AutoFix(config=tmp_path / "mine.json")).ok
        assert server.asked[1].body["model"] == "from-the-environment"
        assert server.asked[1].headers["Authorization"] == f"Bearer {KEY}"


def test_what_is_for_this_machine_goes_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on loopback is asked directly, whatever proxy there is for the rest of the world."""
    with serving([block("print('the proxy')\n")]) as proxy, serving([block(RIGHT)]) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{proxy.host}")
        result, _ = fix(server, "print(")
        assert (result.stdout, len(proxy.asked)) == ("42\n", 0)
        elsewhere = Endpoint("http://elsewhere.example/v1", MODEL, retry_wait_s=0.001)
        result = cloche.run("print(", autofix=AutoFix(elsewhere))
        assert (result.stdout, len(proxy.asked)) == ("the proxy\n", 1)


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://host/v1", "http://", "http://user:pw@host/v1", "http://host/v1?key=a", "http://h o/",
     "http://host:99999/v1", "http://host/\x1b[2J", "http://[host", "http://[::1]x/v1"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """The message names the key of configuration, and repeats nothing of an address that may hold a secret."""
    with pytest.raises(InvalidRequest, match="base_url") as caught:
        Endpoint(url, MODEL)
    assert "pw" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the error says how to get it."""
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(BackendUnavailable, match=r"cloche\[fix\]"):
        Endpoint("http://localhost/v1", MODEL)


def test_out_gets_the_files_of_the_last_run(tmp_path: Path) -> None:
    """What failed runs made is not copied; what they printed does not stay in the spill."""
    code = "open('wrong.txt', 'w').write('a')\nprint('wrong')\n1 / 0\n"
    with serving([block("open('right.txt', 'w').write('b')\nprint('right')\n")]) as server:
        fix(server, code, out=tmp_path / "out", spill=tmp_path / "spill")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["right.txt"]
    assert (tmp_path / "spill" / "stdout.txt").read_text() == "right\n"


def test_a_cell_is_repaired_in_the_state_it_left() -> None:
    """In a session the repaired cell finds what earlier cells defined, and what the failed one did before it failed."""
    prompts: list[str] = []

    def model(prompt: str) -> str:
        prompts.append(prompt)
        return block("total += sum(values)\ntotal\n")

    with cloche.Sandbox(live=False) as sandbox, sandbox.session() as session:
        session.run("values = [1, 2]")
        result = session.run("total = 10\ntotal += sum(value)\ntotal\n", autofix=AutoFix(model))
        assert result.fix is not None
        assert (result.value, result.fix.stop) == (13, FixStop.FIXED)
        assert "a cell of a session" in prompts[0]
        assert len(session.history) == 3
        lost = session.run("import os; os._exit(3)", autofix=AutoFix(pytest.fail))
        assert lost.fix is not None
        assert lost.fix.stop is FixStop.LOST_STATE


def test_the_example_repairs_its_program() -> None:
    """What stands in examples/ runs as it stands."""
    example = Path(__file__).parents[2] / "examples" / "autofix.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True, timeout=60)
    assert "it prints: bob\nfixed after 2 rounds\n" in done.stdout
