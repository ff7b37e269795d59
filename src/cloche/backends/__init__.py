"""Providers of sandboxes, one file or folder each, blind to their siblings."""
