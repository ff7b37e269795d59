"""The routes, one file for each group of paths; each has a `router`, and `app.py` lists them."""
