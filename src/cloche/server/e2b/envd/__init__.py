"""Port 49983 of each sandbox: processes and files, as E2B's `envd` serves them (Connect RPC in JSON, and HTTP)."""
