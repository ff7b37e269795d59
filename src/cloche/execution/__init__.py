"""What turns a call into a run: settings, the choice of a backend, the queue, open sandboxes."""
