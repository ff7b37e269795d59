"""A process of a live sandbox without its output, which stays with its reader: input, signals, its terminal."""

from __future__ import annotations

from cloche.core.errors import InvalidRequest
from cloche.core.result import KillCause, Result
from cloche.init import wire

from .init_link import Operation
from .live_streams import EmptyStream

NOT_READ = "this process was found with reads=False; find it again to wait for its end"


class LiveControl:
    """Hold such a process; see core.protocols.OpenProcess."""

    def __init__(self, channel: Operation):
        self._channel = channel
        self.id, self.pid, self.is_terminal, self.has_input = "", 0, False, False
        self.stdout, self.stderr = EmptyStream(), EmptyStream()

    async def begin(self) -> None:
        """Wait until it is reached. Raises OperationFailed."""
        started = await self._channel.event()
        self.id, self.pid = str(started.get("id", "")), int(started.get("pid") or 0)
        self.is_terminal, self.has_input = started.get("is_terminal") is True, started.get("has_input") is True

    async def write(self, data: bytes) -> bool:
        """Write to its standard input until it has read all; return False if it has closed it."""
        is_sent = await self._channel.send(wire.STDIN, data)
        await self._channel.settle(wire.STDIN)
        return is_sent and not self._channel.closed.done()

    def close_stdin(self) -> None:
        """Close its standard input; on a terminal, as Ctrl-D does."""
        self._channel.end(wire.STDIN)

    def signal(self, number: int, to: str = "process") -> None:
        """Send a signal to the process, to its `group`, or to its whole `tree`."""
        self._channel.ask(do="signal", number=number, to=to)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal."""
        self._channel.ask(do="resize", rows=rows, columns=columns)

    def kill(self, cause: KillCause | None = None) -> None:
        """Kill it and all that it has started."""
        self._channel.ask(do="kill", cause=str(cause or ""))

    def detach(self) -> None:
        """Let it go."""
        self._channel.close()

    async def close(self) -> None:
        """Let it go; it is not ended."""
        self._channel.close()

    async def result(self, *, takes_output: bool = True) -> Result:
        """Raise InvalidRequest: only its reader learns of its end."""
        del takes_output
        raise InvalidRequest(NOT_READ)
