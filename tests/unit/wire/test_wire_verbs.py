"""The document of the wire and the table of its verbs say the same."""

from __future__ import annotations

import re
from pathlib import Path

from cloche.core.letter_case import camel
from cloche.node.verbs import ALL_VERBS, COORDINATOR
from cloche.records.keys import SCOPES

DOCUMENT = Path(__file__).parents[3] / "docs" / "service" / "wire.md"


def test_the_table_of_verbs_is_the_one_in_the_code() -> None:
    """Each verb with its scope, ids and fields, in the same order."""
    rows = [
        line.split("|")[1:5] for line in DOCUMENT.read_text().splitlines() if re.match(r"\| `\w+(\.\w+)?` \|", line)
    ]
    said = [[re.findall(r"[\w.]+", cell) for cell in row] for row in rows]
    assert said == [
        [[name], [verb.scope], list(verb.of), [camel(one) for one in verb.fields.model_fields]]
        for name, verb in ALL_VERBS.items()
    ]


def test_every_verb_takes_a_scope_and_refuses_what_it_does_not_know() -> None:
    """None is open to every key, and none ignores a field."""
    assert {verb.scope for verb in ALL_VERBS.values()} <= {*SCOPES, COORDINATOR}
    assert {verb.fields.model_config.get("extra") for verb in ALL_VERBS.values()} == {"forbid"}
