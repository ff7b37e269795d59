"""Give a live sandbox the program `cloche-why`, which tells its guest why something is refused or not there.

What it knows are the rules, never what is hidden: the names that are hidden in every sandbox, and not those of one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from cloche.core.record import replace

from .sandbox import AsyncSandbox

PROGRAM = "/etc/cloche/bin/cloche-why"


def give_why(sandbox: AsyncSandbox, limits: Sequence[str]) -> None:
    """Show `cloche-why` in a sandbox that is not open yet, on PATH; `limits` are the sentences that it prints.

    Backend `local` at level `jail` alone has it; others ignore it.
    """
    from cloche.workspace.allowed import at_for
    from cloche.workspace.hidden import CREDENTIAL_FILES, CREDENTIAL_FOLDERS, KEY_FILES

    policy, options = sandbox.policy, sandbox._folder_options
    facts = {
        "workspace": "" if options is None else at_for(options.path) if options.at is None else options.at,
        "home": policy.home.at if policy.home is not None else "",
        "read_only": [*policy.toolchains, *(options.read if options is not None else ())],
        "hidden_names": [".env", ".env.*", *sorted(CREDENTIAL_FILES | KEY_FILES | CREDENTIAL_FOLDERS)],
        "limits": list(limits),
    }
    sandbox._prepared = replace(sandbox._prepared, policy=policy.with_changes(why=json.dumps(facts)))
