"""Texts: the same five small programs in every language, skills as people write them, and examples in documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Hold a language's programs.

    `talk` prints `hello`, its arguments joined by `|`, and standard input in capitals, one line each. `leave`
    exits with code 3. `broken` does not compile (or parse), `fails` dies while running; each says its words
    on stderr. `sleeps` says `begun` and would go on for a minute.
    """

    talk: str
    leave: str
    broken: str
    broken_words: str
    fails: str
    fails_words: str
    sleeps: str


PYTHON = Programs(
    talk="""\
import sys
print("hello")
print("|".join(sys.argv[1:]))
print(sys.stdin.read().strip().upper())
""",
    leave="import sys\nsys.exit(3)",
    broken="def (:\n",
    broken_words="SyntaxError",
    fails="print([][5])",
    fails_words="IndexError",
    sleeps="import time\nprint('begun', flush=True)\ntime.sleep(60)",
)

JAVASCRIPT = Programs(
    talk="""\
const { readFileSync } = require('node:fs');
console.log('hello');
console.log(process.argv.slice(2).join('|'));
console.log(readFileSync(0, 'utf8').trim().toUpperCase());
""",
    leave="process.exit(3)",
    broken="let = = 1;",
    broken_words="SyntaxError",
    fails="null.length",
    fails_words="TypeError",
    sleeps="console.log('begun'); setTimeout(() => {}, 60000)",
)

TYPESCRIPT = Programs(
    talk="""\
import { readFileSync } from 'node:fs';
import process from 'node:process';
interface Words { all: string[]; }
enum Greeting { First = 'hello' }
const words: Words = { all: process.argv.slice(2) };
console.log(Greeting.First);
console.log(words.all.join('|'));
console.log(readFileSync(0, 'utf8').trim().toUpperCase());
""",
    leave="import process from 'node:process';\nconst code: number = 3;\nprocess.exit(code);",
    broken="let x: number = = 1;",
    broken_words="/.cloche-main.ts:1",
    fails="const nothing: string[] | null = JSON.parse('null');\nconsole.log(nothing!.length);",
    fails_words="TypeError",
    sleeps="const ms: number = 60000;\nconsole.log('begun'); setTimeout(() => {}, ms)",
)

BASH = Programs(
    talk="""\
echo hello
IFS='|'
echo "$*"
read -r line
printf '%s\\n' "$line" | tr '[:lower:]' '[:upper:]'
""",
    leave="exit 3",
    broken="if then",
    broken_words="yntax error",
    fails='set -eu\necho "$missing_variable"',
    fails_words="missing_variable",
    sleeps="echo begun\nsleep 60",
)

RUBY = Programs(
    talk="""\
puts 'hello'
puts ARGV.join('|')
puts STDIN.read.strip.upcase
""",
    leave="exit 3",
    broken="def 1x",
    broken_words="/.cloche-main.rb:1",
    fails="nil.length",
    fails_words="NoMethodError",
    sleeps="$stdout.sync = true\nputs 'begun'\nsleep 60",
)

GO = Programs(
    talk="""\
package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

func main() {
	fmt.Println("hello")
	fmt.Println(strings.Join(os.Args[1:], "|"))
	line, _ := bufio.NewReader(os.Stdin).ReadString('\\n')
	fmt.Println(strings.ToUpper(strings.TrimSpace(line)))
}
""",
    leave='package main\nimport "os"\nfunc main() { os.Exit(3) }\n',
    broken="package main\nfunc main() { missing() }\n",
    broken_words="undefined: missing",
    fails='package main\nfunc main() { var m map[string]int; m["a"] = 1 }\n',
    fails_words="panic: assignment to entry in nil map",
    sleeps="""\
package main

import (
	"fmt"
	"time"
)

func main() {
	fmt.Println("begun")
	time.Sleep(time.Minute)
}
""",
)

RUST = Programs(
    talk="""\
use std::io::Read;
fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).unwrap();
    println!("hello\\n{}\\n{}", words.join("|"), text.trim().to_uppercase());
}
""",
    leave="fn main() { std::process::exit(3) }",
    broken="fn main() { missing(); }",
    broken_words="cannot find function `missing`",
    fails='fn main() { panic!("no way on") }',
    fails_words="no way on",
    sleeps="""\
fn main() {
    println!("begun");
    std::thread::sleep(std::time::Duration::from_secs(60));
}
""",
)

CSHARP = Programs(
    talk="""\
using System;
class Program {
    static void Main(string[] words) {
        Console.WriteLine("hello");
        Console.WriteLine(string.Join("|", words));
        Console.WriteLine(Console.In.ReadToEnd().Trim().ToUpper());
    }
}
""",
    leave="class Program { static int Main() { return 3; } }",
    broken="class Program { static void Main() { Missing(); } }",
    broken_words="CS0103",
    fails='class Program { static void Main() { throw new System.Exception("no way on"); } }',
    fails_words="no way on",
    sleeps="""\
using System;
using System.Threading;
class Program { static void Main() { Console.WriteLine("begun"); Thread.Sleep(60000); } }
""",
)

PROGRAMS = {
    "python": PYTHON,
    "javascript": JAVASCRIPT,
    "typescript": TYPESCRIPT,
    "bash": BASH,
    "ruby": RUBY,
    "go": GO,
    "rust": RUST,
    "csharp": CSHARP,
}


_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path, kind: str) -> list[str]:
    """Return a document's fenced blocks of one kind."""
    return [text for found, text in _BLOCK.findall(document.read_text()) if found == kind]


def commands(document: Path) -> Iterator[tuple[str, str]]:
    """Yield each command of a document's console blocks with what it should print."""
    for text in blocks(document, "console"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            yield command, expected


def matches(expected: str, printed: str) -> bool:
    """Compare, with `...` for anything and without regard to blank space: its amount, and any after a comma or a colon,
    where JSON is written with and without it.
    """
    first, *rest = (_plain(piece) for piece in expected.split("..."))
    text = _plain(printed)
    if not rest:
        return text == first
    if not text.startswith(first):
        return False
    *pieces, last = rest
    at = len(first)
    for piece in pieces:  # a regular expression would try every place for every piece
        at = text.find(piece, at) + len(piece)
        if at < len(piece):
            return False
    return text.endswith(last) and at + len(last) <= len(text)


def _plain(text: str) -> str:
    return re.sub(r"(?<=[,:]) ", "", " ".join(text.split()))


CARD = "---\nname: {name}\ndescription: What it is for.\n---\n\nHow it is used.\n"


def write_skill(
    parent: Path, name: str = "demo", *, manifest: str | None = None, card: str | None = None, **files: str | bytes
) -> Path:
    """Create a skill's folder and return it; `files` are scripts by their names, dots written as two underscores."""
    named: Mapping[str, str | bytes] = {f"scripts/{key.replace('__', '.')}": text for key, text in files.items()}
    folder = parent / name
    (folder / "scripts").mkdir(parents=True)
    (folder / "SKILL.md").write_text(CARD.format(name=name) if card is None else card)
    if manifest is not None:
        (folder / "cloche-skill.yaml").write_text(manifest)
    for path, text in named.items():
        (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


# What a network by name is to a program: an address, a refusal that is read, and a name that is none. It sends nothing.
NAMES_AND_A_LITERAL = """\
import socket, sys, urllib.error, urllib.request
print(socket.gethostbyname("good.example"))
try:
    urllib.request.urlopen("http://198.51.100.7/", timeout=20)
except urllib.error.HTTPError as error:
    print(error.code)
try:
    socket.gethostbyname("bad.example")
except OSError:
    sys.exit(3)
"""
