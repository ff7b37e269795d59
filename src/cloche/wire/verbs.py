"""The verbs of the wire: for each the scope, the work, its fields, and its ids.

Unknown fields are errors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cloche.core.record import dataclass

from . import at_path, copies, files, inputs, processes, questions, sandboxes, session_calls, sessions, work
from .calls import Call, CallRequest, Nothing
from .exec_options import OptionFields, WireModel

Work = Callable[[Call, CallRequest], Awaitable[object]]
IN_SANDBOX, IN_PROCESS, IN_SESSION = ("sandbox",), ("sandbox", "process"), ("sandbox", "session")
IN_WORKSPACE = ("workspace",)


@dataclass(frozen=True, slots=True)
class Verb:
    """Describe a verb. If `is_inside`, the sandbox is held open during its work."""

    scope: str
    work: Work
    fields: type[WireModel] = Nothing
    of: tuple[str, ...] = IN_SANDBOX
    is_inside: bool = True


def _called(function: Callable[..., Awaitable[object]]) -> Work:
    """Return work that calls a function with the sandbox, the ids and the fields."""

    async def do(_: Call, request: CallRequest) -> object:
        more: dict[str, Any] = {f"{name}_id": value for name, value in request.ids.items() if name != "sandbox"}
        if not isinstance(request.fields, Nothing):
            more["body"] = request.fields
        return await function(use=request.use, **more)

    return do


VERBS: Mapping[str, Verb] = {
    "sandbox.open": Verb("run", work.open_sandbox, sandboxes.NewSandbox, of=(), is_inside=False),
    "sandbox.list": Verb("read", work.list_sandboxes, work.Listing, of=(), is_inside=False),
    "sandbox.look": Verb("read", work.look, is_inside=False),
    "sandbox.attach": Verb("read", work.attach),
    "sandbox.hold": Verb("run", work.hold),
    "sandbox.clock": Verb("read", copies.clock),
    "sandbox.pause": Verb("run", _called(sandboxes.pause), sandboxes.Pause),
    "sandbox.resume": Verb("run", _called(sandboxes.resume), sandboxes.Pause),
    "sandbox.lifetime": Verb("run", _called(sandboxes.set_lifetime), sandboxes.Lifetime),
    "sandbox.end": Verb("run", work.end, is_inside=False),
    "code.exec": Verb("run", inputs.run_apart, work.WireExec, of=(), is_inside=False),
    "workspace.open": Verb("run", work.open_workspace, OptionFields, of=(), is_inside=False),
    "workspace.run": Verb("run", inputs.run_in_workspace, work.WorkspaceRun, of=IN_WORKSPACE, is_inside=False),
    "workspace.read": Verb("read", work.read_in_workspace, at_path.WholeFile, of=IN_WORKSPACE, is_inside=False),
    "workspace.write": Verb("run", work.write_in_workspace, at_path.AtPath, of=IN_WORKSPACE, is_inside=False),
    "run": Verb("run", work.run, work.LiveRun),
    "exec": Verb("run", work.execute, processes.NewProcess),
    "process.start": Verb("run", work.start, work.StartedProcess),
    "process.follow": Verb("run", work.follow, of=IN_PROCESS),
    "process.list": Verb("read", _called(processes.processes)),
    "process.logs": Verb("read", work.logs, of=IN_PROCESS),
    "process.wait": Verb("run", work.wait, work.Patience, of=IN_PROCESS),
    "process.write": Verb("run", _called(processes.write), processes.Input, of=IN_PROCESS),
    "process.signal": Verb("run", _called(processes.send_signal), processes.Signal, of=IN_PROCESS),
    "process.resize": Verb("run", work.resize, work.Size, of=IN_PROCESS),
    "process.detach": Verb("run", work.detach, of=IN_PROCESS),
    "process.kill": Verb("run", _called(processes.kill), of=IN_PROCESS),
    "session.open": Verb("run", session_calls.open_session, session_calls.WireSession),
    "session.list": Verb("read", _called(sessions.sessions)),
    "session.look": Verb("read", _called(sessions.look), of=IN_SESSION),
    "session.calls": Verb("run", session_calls.carry_calls, of=IN_SESSION),
    "session.run": Verb("run", session_calls.run_cell, sessions.Cell, of=IN_SESSION),
    "session.interrupt": Verb("run", _called(sessions.interrupt), of=IN_SESSION),
    "session.checkpoint": Verb("run", _called(sessions.checkpoint), sessions.Checkpoint, of=IN_SESSION),
    "session.rollback": Verb("run", _called(sessions.rollback), sessions.Checkpoint, of=IN_SESSION),
    "session.fork": Verb("run", session_calls.fork, sessions.Forks, of=IN_SESSION),
    "session.readFile": Verb("read", work.read_of_session, at_path.WholeFile, of=IN_SESSION),
    "session.writeFile": Verb("run", work.write_of_session, at_path.AtPath, of=IN_SESSION),
    "session.close": Verb("run", _called(sessions.close), of=IN_SESSION),
    "file.stat": Verb("read", work.stat, at_path.AtPathBy),
    "file.list": Verb("read", work.list_folder, at_path.Listed),
    "file.read": Verb("read", work.read, at_path.Part),
    "file.write": Verb("run", work.write, at_path.NewContent),
    "file.makeFolder": Verb("run", _called(files.make_folder), files.NewFolder),
    "file.move": Verb("run", _called(files.move), files.Move),
    "file.remove": Verb("run", work.remove, at_path.AtPathBelow),
    "file.compose": Verb("run", _called(files.compose), files.Sources),
    "file.space": Verb("read", work.space),
    "file.pack": Verb("read", work.pack, at_path.AtPath),
    "file.unpack": Verb("run", work.unpack, at_path.AtPathInTime),
    "file.changes": Verb("run", copies.changes, copies.ChangesSince),
    "file.watch": Verb("read", work.watch, at_path.Watched),
    "port.list": Verb("read", _called(sandboxes.ports)),
    "port.connect": Verb("run", work.connect, work.Port),
    "network.look": Verb("read", _called(sandboxes.network)),
    "network.allow": Verb("run", _called(sandboxes.allow), sandboxes.NetworkRules),
    "network.deny": Verb("run", _called(sandboxes.deny), sandboxes.NetworkRules),
    "network.replace": Verb("run", _called(sandboxes.replace_rules), sandboxes.NewRules),
    "network.ask": Verb("run", questions.ask),
    "network.answer": Verb("run", questions.answer, questions.Answer),
}
