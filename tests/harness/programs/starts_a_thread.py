"""A module that must not be loaded ahead: importing it starts a thread."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
