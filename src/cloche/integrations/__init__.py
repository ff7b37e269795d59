"""Doors for other frameworks: one file each, imported by name, so that no framework is needed for another."""
