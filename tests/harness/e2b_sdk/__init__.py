"""Programs that call every method of E2B's SDKs, each with what E2B's documents promise of it.

`rows` has the list of all methods, from the SDK itself, and `shows`, which names the methods that a program shows;
`both` lets a program be written once for the blocking and the asynchronous SDK. The other modules are programs; those
in `javascript/` do the same with the packages for Node.
"""
