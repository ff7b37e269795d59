"""Adapters for agent frameworks, one file each: `langchain`, `inspect_ai`, `deepagents`, `pydantic_ai`.

In: a `Toolbox`, or for a framework's own sandboxes a `SandboxOptions`. Out: tools, or a sandbox, in the framework's
types. Imported by name, so that no framework is needed for another. `environment` is the base of the sandboxes of all
frameworks: one that is opened at its first use, and used from any event loop and any thread.

To be kept: approval and limits stay with the toolbox, where a failed or refused call is a message, not an exception; no
adapter imports another; code for one framework alone stays in its file. A framework is added as one file.
"""
