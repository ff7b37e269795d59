"""What Cloche means: requests, results, limits, policies, levels. Standard library only, no I/O, no clock."""
