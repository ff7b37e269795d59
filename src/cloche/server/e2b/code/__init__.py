"""Port 49999 of each sandbox: contexts and cells, as E2B's code interpreter serves them (JSON, one object per line)."""
