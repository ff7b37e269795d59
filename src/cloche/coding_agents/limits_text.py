"""What an agent is told at its start: its limits, in sentences, as a marked block of its instructions file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.core.refusals import listed

BEGIN, END = "<!-- cloche: limits of this sandbox -->", "<!-- cloche: end -->"
MOST_BYTES = 1 << 20  # of an instructions file

_WORK = (
    "You work in a sandbox (Cloche) on the user's machine. The project is {folder}. At the end the user sees what you "
    "changed there as a diff, and decides what becomes real; dangerous files (git hooks, CI, editor settings) are "
    "shown first."
)
_HIDDEN = (
    "Files with credentials (.env, private keys, ~/.ssh) are not there, and of the user's home folder only a few "
    "settings. Do not look for them."
)
_WHY = (
    "`cloche-why HOST` and `cloche-why PATH` say why a host is refused or a file is missing, and what would allow it; "
    "`cloche-why` alone prints these limits. Do not try to get around a refusal: tell the user what you need."
)


def limit_lines(
    policy: Policy, limits: Limits, *, folder: str, read_only: Sequence[str] = (), is_alone: bool = False
) -> list[str]:
    """Return the limits of an agent's sandbox, a sentence or two each; `is_alone`: no user can be asked meanwhile."""
    also = [f"Also there, for reading alone: {listed(read_only, len(read_only))}."] if read_only else []
    size = f"{limits.memory_bytes // MIB} MiB of memory, {limits.cpus:g} processors, {limits.pids} processes"
    network, secrets = _network(policy, is_alone=is_alone), _secrets(policy)
    return [_WORK.format(folder=folder), *network, *secrets, _HIDDEN, *also, f"Limits: {size}.", _WHY]


def _network(policy: Policy, *, is_alone: bool) -> Iterable[str]:
    if policy.network not in ("allowlist", "open"):
        yield "There is no network."
        return
    hosts = policy.network_allow
    if policy.network == "open":
        yield "Public hosts can be reached on ports 80 and 443."
    else:
        asks = policy.on_network == "ask" and not is_alone
        others = (
            "for others the user is asked, which may take minutes: a connection waits, or says so"
            if asks
            else ("others are refused")
        )
        yield f"Hosts that you reach: {listed(hosts, len(hosts)) if hosts else 'none'}; {others}."
    for port in policy.host_ports:
        yield f"127.0.0.1:{port} is a server on the user's machine, outside of the sandbox."


def _secrets(policy: Policy) -> Iterable[str]:
    for name, hosts in (policy.secrets.hosts_by_name if policy.secrets is not None else {}).items():
        yield (
            f"${name} is a placeholder. Use it as the value: it works in requests to {listed(hosts, len(hosts))}, and "
            "nobody here can read the value."
        )


def with_limits(existing: str, lines: Iterable[str]) -> str:
    """Return an instructions file with the limits as its last block, in place of an earlier one; the rest stays."""
    before, _, rest = existing.partition(BEGIN)
    after = rest.partition(END)[2].lstrip("\n") if rest else ""
    own = f"{before.rstrip()}\n{after}".strip("\n")
    block = "\n".join((BEGIN, "# The sandbox you are in", "", *(f"- {line}" for line in lines), END))
    return f"{own}\n\n{block}\n" if own else f"{block}\n"
