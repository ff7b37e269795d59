"""The label by which a sandbox at a provider is known to be ours; its value is `garbage_collection.owner()`."""

LABEL = "cloche-owner"
