"""The routes, one file for each group of paths. Each has a `router`; `app.py` lists them."""
