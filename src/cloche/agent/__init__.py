"""Tools for agents: what they are, what they may do, who approves it, and what the model is told."""
