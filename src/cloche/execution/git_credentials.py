"""Git inside with a secret of its host: a helper answers with the placeholder, and addresses for SSH become HTTPS.

The egress process puts the value in the place of the placeholder, in the header that git sends. Nothing here has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# The names of users that these hosts take with a token as the password.
_USERS: Mapping[str, str] = {"github.com": "x-access-token", "gitlab.com": "oauth2"}
# The first helper is empty: none of those before it is asked. A shell reads the second one, with what git wants to do.
_SECTION = """\
[credential "https://{host}"]
\thelper =
\thelper = "!f() {{ test \\"$1\\" = get && echo username={user} && echo password=\\"${name}\\"; }}; f"
[url "https://{host}/"]
\tinsteadOf = git@{host}:
\tinsteadOf = ssh://git@{host}/
"""


def credential_config(hosts_by_name: Mapping[str, Sequence[str]]) -> str:
    """Return a git configuration for secrets by name with their hosts; empty where git has no use for any."""
    names: dict[str, str] = {}
    for name, hosts in hosts_by_name.items():
        for host in hosts:
            names.setdefault(host, name)
    return "".join(
        _SECTION.format(host=host, user=user, name=names[host]) for host, user in _USERS.items() if host in names
    )
