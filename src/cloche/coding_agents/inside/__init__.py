"""Programs that are sent as text into an agent's sandbox. Standard library only.

No module imports them. What they print is the guest's: its reader bounds and checks it.
"""
