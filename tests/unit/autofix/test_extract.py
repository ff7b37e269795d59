"""What is taken out of a model's answer, and what is not."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche.autofix.extract import MOST_CODE_CHARS, apply_patch, extract_code, fenced_blocks, looks_like_patch

OLD = "def mean(values):\n    return sum(values) / len(value)\n\nprint(mean([1, 2, 3]))\n"
NEW = "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([1, 2, 3]))\n"
PATCH = (
    "@@ -1,4 +1,4 @@\n def mean(values):\n-    return sum(values) / len(value)\n+    return sum(values) / len(values)\n"
)
DOCUMENTED = 'TEXT = """\n```\nan example\n```\n"""\nprint(TEXT)\n'
MARKDOWN = 'TEXT = """\n```json\n{"a": 1}\n```\n"""\nprint(TEXT)\n'


def fence(code: str, tag: str = "python", marks: str = "```") -> str:
    """Return code in a fenced block."""
    ended = code.rstrip("\n")
    return f"{marks}{tag}\n{ended}\n{marks}\n"


FOUND = {
    "a block with its language": fence(NEW),
    "a block without": fence(NEW, ""),
    "prose around it": f"The name was wrong.\n\n{fence(NEW)}\nThat is all. Run it again!",
    "an alias": fence(NEW, "py"),
    "capitals": fence(NEW, "Python"),
    "a title in the info": fence(NEW, 'python title="main.py"'),
    "braces in the info": fence(NEW, "{.python}"),
    "tildes": fence(NEW, marks="~~~"),
    "four ticks": fence(NEW, marks="````"),
    "no end": f"```python\n{NEW}",
    "Windows line ends": fence(NEW).replace("\n", "\r\n"),
    "a mark of byte order": f"\ufeff{fence(NEW)}",
    "a list's indent": "1. Like this:\n" + "\n".join(f"   {line}" for line in fence(NEW).splitlines()),
    "the old program first": f"You wrote:\n{fence(OLD)}\nWrite:\n{fence(NEW)}",
    "a command after it": f"{fence(NEW)}\nThen:\n{fence('python main.py', 'bash')}",
    "its output after it": f"{fence(NEW)}\nIt prints:\n{fence('2.0', 'text')}",
    "a short piece first": f"Change:\n{fence('len(values)')}\nIn full:\n{fence(NEW)}",
    "thinking before it": f"<think>\nMaybe {fence('print(0)')}\n</think>\n{fence(NEW)}",
    "thinking without a beginning": f"I should rename it.\n</think>\n{fence(NEW)}",
    "thinking twice": f"<think>a</think>\n<thinking>b</thinking>{fence(NEW)}",
    "JSON": json.dumps({"explanation": "a name", "code": NEW}),
    "JSON in a block": fence(json.dumps({"fixed_code": NEW}) + "\n", "json"),
    "a block in JSON": json.dumps({"answer": f"Here:\n{fence(NEW)}"}),
    "JSON in JSON": json.dumps({"result": {"code": NEW}}),
    "JSON as text": json.dumps(NEW),
    "code alone": NEW,
    "prose and then code alone": f"Here is the corrected program:\n\n{NEW}",
    "a diff in a block": fence(PATCH, "diff"),
    "a diff in a block of the language": fence(PATCH),
    "a diff with names": fence(f"--- a/main.py\n+++ b/main.py\n{PATCH}", "patch"),
    "a diff alone": f"--- a/main.py\n+++ b/main.py\n{PATCH}",
    "a diff whose numbers are wrong": fence(PATCH.replace("-1,4 +1,4", "-40,9 +41,9"), "diff"),
    "a diff without numbers": fence(PATCH.replace("@@ -1,4 +1,4 @@", "@@"), "diff"),
}


@pytest.mark.parametrize("reply", FOUND.values(), ids=FOUND)
def test_a_program_is_found(reply: str) -> None:
    """However it is wrapped, the program that comes out is the one that was meant."""
    found = extract_code(reply, language="python", code=OLD)
    assert found.code.rstrip("\n") == NEW.rstrip("\n"), found.why_not


@pytest.mark.parametrize("code", [DOCUMENTED, MARKDOWN], ids=["bare", "with a language"])
def test_fences_inside_of_a_program_belong_to_it(code: str) -> None:
    """A program that holds fences in a string is not cut at the first of them."""
    reply = f"Like this:\n{fence(code)}\nIt works now."
    assert extract_code(reply, language="python", code=OLD).code == code


def test_a_longer_fence_holds_shorter_ones() -> None:
    """As in Markdown, a fence ends with one at least as long."""
    reply = fence("print('''\n```\n''')\n", marks="````")
    assert extract_code(reply, language="python", code=OLD).code == "print('''\n```\n''')\n"


@pytest.mark.parametrize(
    ("language", "tag"),
    [("javascript", "js"), ("typescript", "ts"), ("bash", "sh"), ("ruby", "rb"), ("go", "golang"), ("rust", "rs"),
     ("csharp", "c#")],
)  # fmt: skip
def test_every_language_is_known_by_its_short_name(language: str, tag: str) -> None:
    """Blocks are recognised by what people call a language; others beside them are left alone."""
    reply = f"{fence('x = 1', 'toml')}{fence('right();', tag)}"
    assert extract_code(reply, language=language, code="wrong();").code == "right();\n"


NOTHING = {
    "nothing": "",
    "blanks": " \n\t\n",
    "an apology": "I am sorry, but I cannot help with that.",
    "advice": "You should rename the variable value to values in the second line of the function. Then it will work.",
    "several paragraphs": "The error is simple.\n\nPython does not know it.\n\nPlease check it, then run it again.",
    "a name in ticks": "Use `len(values)` instead of `len(value)`, and it will be fine.",
    "an empty block": fence(""),
    "a block of comments": fence("# here goes the program\n# and nothing else\n"),
    "another language": fence("rm -rf /\n", "bash"),
    "thinking that never ends": f"<think>\nWell, {fence(NEW)}",
    "only thinking": "<think>Hm.</think>",
    "JSON without code": '{"status": "ok", "confidence": 0.9}',
    "deep JSON": "[" * 50_000 + "]" * 50_000,
    "deep JSON that says code": '{"code":' * 3_000 + '"x"' + "}" * 3_000,
    "NUL": fence("print(1)\0\n"),
    "too long": fence("print(1)\n" * (MOST_CODE_CHARS // 9 + 1)),
    "parts left out": fence("import os\n# ... rest of the code unchanged ...\nprint(1)\n"),
    "parts left out in other words": fence("print(1)\n# (existing code here)\n"),
    "a diff of another program": fence("@@ -1 +1 @@\n-hello\n+goodbye\n", "diff"),
    "a diff of nothing": fence("--- a\n+++ b\n@@ -1 +1 @@\n def mean(values):\n", "diff"),
}


@pytest.mark.parametrize("reply", NOTHING.values(), ids=NOTHING)
def test_nothing_is_found_where_nothing_is(reply: str) -> None:
    """An answer without a usable program gives none, and says why."""
    found = extract_code(reply, language="python", code=OLD)
    assert found.code == ""
    assert found.why_not


def test_a_comment_about_the_rest_is_no_gap() -> None:
    """Words such as `rest` and `code` in an ordinary comment leave a program what it is."""
    code = "# rest of the numbers are added up in code below, one after the other, from the list\nprint(sum([1, 2]))\n"
    assert extract_code(fence(code), language="python", code=OLD).code == code


def test_the_old_program_alone_is_returned_as_it_is() -> None:
    """Who is asked to tell that nothing changed must see what came."""
    assert extract_code(fence(OLD), language="python", code=OLD).code == OLD


def test_a_diff_goes_to_the_nearest_place_that_fits() -> None:
    """Of several equal places the one that is nearest to the stated line is changed."""
    code = "a\nx\nb\nx\nc\n"
    assert apply_patch(code, "@@ -4 +4 @@\n-x\n+y\n") == "a\nx\nb\ny\nc\n"
    assert apply_patch(code, "@@ -2 +2 @@\n-x\n+y\n") == "a\ny\nb\nx\nc\n"


def test_a_diff_of_several_hunks_is_applied_whole_or_not_at_all() -> None:
    """A hunk that does not fit spoils the diff."""
    good = "@@ -1 +1 @@\n-a\n+A\n@@ -3 +3 @@\n-c\n+C\n+d\n"
    assert apply_patch("a\nb\nc\n", good) == "A\nb\nC\nd\n"
    assert apply_patch("a\nb\nx\n", good) is None


def test_a_program_with_signs_at_the_line_is_no_diff() -> None:
    """Minus and plus at the beginning of lines do not make a diff."""
    assert not looks_like_patch("x = [\n-1,\n+2,\n]\n")


HOSTILE = (
    "```" * 60_000, "```python\n" * 20_000, "`" * 200_000, "<think>" * 30_000, "<think></think>" * 20_000,
    "{" * 100_000, "--- a\n+++ b\n" * 10_000 + "-x\n", "# ... rest " * 20_000, "Aa " * 100_000, "a(" * 150_000,
    "```\n" + '"""\n```\n' * 5_000, " " * 300_000, "@@ @@\n-x\n" * 20_000, "0:" * 150_000,
    "```python\n" + '"""\n' + "```\n" * 95_000, "```a\n" + "```b\n```\n" * 43_000, f"```\n{' ' * 390_000}x\n```",
    f"```{' ' * 390_000}`", "# ... rest " + " code" * 70_000, "@@ @@\n" + " \n" * 50_000 + "-x\n",
    '"' + "\\" * 300_000, f"   ```{' ' * 190}`\n" * 2_000,
)  # fmt: skip


@pytest.mark.parametrize("reply", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_answer_costs_little(reply: str) -> None:
    """No answer, however odd, keeps the reader busy."""
    began = time.process_time()
    extract_code(reply, language="python", code=OLD)
    assert time.process_time() - began < 5


def test_many_diffs_of_a_long_program_cost_little() -> None:
    """However many hunks are to be looked for, in however long a program, the reader is soon done."""
    hunks = (" \n" * 20 + "+a\n-\n@@ @@\n") * 190
    began = time.process_time()
    extract_code(f"```diff\n@@ -1 +1 @@\n{hunks} no\n-z\n```\n" * 20, language="python", code="\n" * 19_000 + "x\n")
    assert time.process_time() - began < 5


def test_a_line_number_of_any_length_is_no_trouble() -> None:
    """Python reads no number of thousands of digits; the diff's text says where it belongs."""
    reply = fence(f"@@ -{'9' * 5000} +1 @@\n-a = 1\n+a = 2", "diff")
    assert extract_code(reply, language="python", code="a = 1\n").code == "a = 2\n"


@settings(max_examples=150)
@given(st.text(alphabet=st.sampled_from("`~\n ab{}\"'<>/think#.+-@=()"), max_size=200))
def test_no_text_is_too_odd(reply: str) -> None:
    """Whatever an answer is made of, the outcome is a program or a reason."""
    found = extract_code(reply, language="python", code=OLD)
    assert bool(found.code) != bool(found.why_not)
    assert all(isinstance(block.text, str) for block in fenced_blocks(reply))
