"""Adapters for agent frameworks, one file each: `langchain`.

In: a `Toolbox`. Out: its tools as the framework's own. Imported by name, so that no framework is needed for another.

To be kept: approval and limits stay with the toolbox; a failed or refused call is a message, not an exception. A
framework is added as one file.
"""
