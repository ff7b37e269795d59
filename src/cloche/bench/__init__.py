"""The benchmark: contestants that take turns in one process, and what is said of them afterwards."""
