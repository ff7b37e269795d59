"""Adapters for agent frameworks, one file each: `langchain`, `inspect_ai`, `deepagents`, `pydantic_ai`.

In: a `Toolbox`, or for a sandbox of the framework's own a `SandboxOptions`. Out: tools, or a sandbox, as the framework
has them. Imported by name, so that no framework is needed for another. `environment` is what the sandboxes of all
frameworks stand on: one that is opened at its first use, and used from any event loop and any thread.

To be kept: approval and limits stay with the toolbox, where a failed or refused call is a message, not an exception; no
adapter imports another; what only one framework wants stays in its file. A framework is added as one file.
"""
