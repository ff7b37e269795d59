"""Whether what was typed so far is a whole cell, or more lines must follow.

Python is asked itself; JavaScript and Bash are looked at for quotes, brackets and backslashes that are open. This
reads what a person typed on this side; nothing of it is run here.
"""

from __future__ import annotations

import ast
import codeop
import re
import warnings

PAIRS = {")": "(", "]": "[", "}": "{", "fi": "if", "esac": "case", "done": "do"}
# What is skipped, what is open up to the end of the text, and what opens and closes.
TOKENS = {
    "bash": re.compile(
        r"""(?<!\S)\#[^\n]* | '[^']*' | "(?:\\.|[^"\\])*" | \\. | (?P<open>['"]|\\\Z)
        | (?P<bracket>[][(){}] | (?<![^\s;&|(]) (?:if|fi|case|esac|do|done) (?![^\s;&|)]))""",
        re.VERBOSE | re.DOTALL,
    ),
    "javascript": re.compile(
        r"""//[^\n]* | /\*.*?\*/ | '(?:\\.|[^'\\\n])*' | "(?:\\.|[^"\\\n])*" | `(?:\\.|[^`\\])*` | \\.
        | (?P<open>`|/\*|\\\Z) | (?P<bracket>[][(){}])""",
        re.VERBOSE | re.DOTALL,
    ),
}


def goes_on(text: str, language: str) -> bool:
    """Tell whether a cell that begins with `text` goes on; a blank line ends it, except inside of a quote."""
    if language == "python":
        return _python_goes_on(text)
    return language in TOKENS and _text_goes_on(text, language)


def _python_goes_on(text: str) -> bool:
    *before, last = text.split("\n")
    if not last.strip():
        return bool(before) and _is_cut_off(text)
    if text.startswith("%%") or _is_cut_off(text):
        return True
    return bool(before) and last[0] in " \t" and _ends_in_block(text)


def _ends_in_block(text: str) -> bool:
    """Tell whether the last statement is one that has statements below it."""
    try:
        statement = ast.parse(text).body[-1]
        return hasattr(statement, "body") or hasattr(statement, "cases")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # a line of another language, say
        heads = [line for line in text.split("\n") if line[:1].strip()]
        return bool(heads) and heads[-1].rstrip().endswith(":")


def _is_cut_off(text: str) -> bool:
    """Ask the compiler whether the only thing wrong with a text is that it ends."""
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compiler(text, "<input>", "exec") is None
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return False  # whoever runs it will say what is wrong


def _text_goes_on(text: str, language: str) -> bool:
    """Look for what is open: a quote, a comment, a bracket, or the last line."""
    is_blank = not text.rpartition("\n")[2].strip()
    stack = [""]
    for token in TOKENS[language].finditer(text):
        bracket = token["bracket"]
        if token["open"]:
            return True
        if bracket in PAIRS.values():
            stack.append(bracket)
        elif bracket and stack[-1] == PAIRS[bracket]:
            stack.pop()
    return len(stack) > 1 and not is_blank
