"""Warm starts: templates that fork, and finished jails that wait for code. Standard library only."""
