"""Facts about the servers in pods, read from their logs and checked before a lease needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from urllib.parse import urlsplit

from cloche.core.errors import BackendUnavailable
from cloche.core.record import dataclass

from .api import KubernetesApi
from .forwarding import PodAddresses
from .pods import CONTAINER, NodeFacts, Pod, facts_of

MOST_LOG = 1 << 16
READ_AHEAD, READS_AT_ONCE = 4, 8  # pods whose logs are read before they are needed, at most
SERVES_S = 30.0  # for the first words of a server whose port is open
UNFIT_S = 15.0  # how long a pod that cannot be used is not tried again
ALL = "*"  # in place of a container, where no pod may be claimed
MOST_KEPT = 256  # facts and reasons, beside twice the number of pods


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """Say why something cannot be used, until a time of the event loop."""

    reason: str
    until: float

    @classmethod
    def now(cls, reason: str) -> Unfit:
        """Return the reason, for a while."""
        return cls(reason=reason, until=asyncio.get_running_loop().time() + UNFIT_S)

    @property
    def holds(self) -> bool:
        """Tell whether it is not over."""
        return self.until > asyncio.get_running_loop().time()


class PodServers:
    """Know the servers of pods. `path` is that of the pods; a server of another `version` is not used."""

    def __init__(self, api: KubernetesApi, path: str, version: str, ways: PodAddresses):
        self._api, self._path, self._version, self._ways = api, path, version, ways
        self._facts: dict[str, NodeFacts] = {}  # by the container
        self._unfit: dict[str, Unfit] = {}
        self._reading: dict[str, asyncio.Task[NodeFacts]] = {}
        self._reads = asyncio.Semaphore(READS_AT_ONCE)

    def reason(self, pod: Pod) -> str:
        """Return why a pod cannot be used, empty where nothing is known against it."""
        unfit = [self._unfit[key] for key in (pod.container, ALL) if key in self._unfit]
        return next((each.reason for each in unfit if each.holds), pod.over or pod.stuck)

    def note_unfit(self, container: str, error: BaseException) -> None:
        """Note why a pod, or all of them, cannot be used for a while."""
        self._unfit[container] = Unfit.now(str(error))

    def read_ahead(self, pods: Iterable[Pod], claims: int) -> None:
        """Read what the next claims need; a process that has claimed one pod so far may need no other."""
        for pod in islice(pods, max(min(claims - 1, READ_AHEAD), 0)):
            if pod.container not in self._facts and not self.reason(pod):
                self._read(pod)

    async def facts(self, pod: Pod) -> NodeFacts:
        """Return the facts of a pod's server, after checks that it can be used. Raises BackendUnavailable."""
        facts = self._facts.get(pod.container)
        return facts if facts is not None else await asyncio.shield(self._read(pod))

    def forget_all_but(self, pods: Iterable[Pod]) -> None:
        """Forget containers that are gone, from time to time."""
        here = {ALL, *(pod.container for pod in pods)}
        if len(self._facts) + len(self._unfit) > 2 * len(here) + MOST_KEPT:
            self._facts = {name: facts for name, facts in self._facts.items() if name in here}
            self._unfit = {name: unfit for name, unfit in self._unfit.items() if name in here}

    async def close(self) -> None:
        """Stop reading."""
        reading = [*self._reading.values()]
        for work in reading:
            work.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    def _read(self, pod: Pod) -> asyncio.Task[NodeFacts]:
        reading = self._reading.get(pod.container)
        if reading is None:
            reading = self._reading[pod.container] = asyncio.create_task(self._read_facts(pod))
            reading.add_done_callback(lambda done: self._note_read(pod, done))
        return reading

    def _note_read(self, pod: Pod, done: asyncio.Task[NodeFacts]) -> None:
        self._reading.pop(pod.container, None)
        if done.cancelled():
            return
        if (error := done.exception()) is None:
            self._facts[pod.container] = done.result()
        else:
            self.note_unfit(pod.container, error)

    async def _read_facts(self, pod: Pod) -> NodeFacts:
        facts = await self._printed(pod) or await self._printed_later(pod)
        if facts is None or urlsplit(facts.address).hostname != pod.address:
            raise BackendUnavailable("the log of the pod has no address and certificate of its server.")
        if self._version and facts.version != self._version:
            raise BackendUnavailable(
                f"it has Cloche {facts.version}, and this is {self._version}.",
                remedy="Use an image with the same version (fleet.image).",
            )
        await self._ways.check(pod.name, facts.address)
        return facts

    async def _printed(self, pod: Pod) -> NodeFacts | None:
        async with self._reads:
            return facts_of(await self._api.text(self._log(pod), container=CONTAINER, limitBytes=str(MOST_LOG)))

    async def _printed_later(self, pod: Pod) -> NodeFacts | None:
        """Follow the log: a port is open somewhat before its server serves. None where it ends, or says nothing."""
        query = {"container": CONTAINER, "limitBytes": str(MOST_LOG), "follow": "true"}
        with suppress(TimeoutError, OSError, ValueError):  # the last one: a line that is too long
            async with asyncio.timeout(SERVES_S):
                async for line in self._api.text_lines(self._log(pod), timeout_s=SERVES_S, **query):
                    if (facts := facts_of(line)) is not None:
                        return facts
        return None

    def _log(self, pod: Pod) -> str:
        return f"{self._path}/{pod.name}/log"
