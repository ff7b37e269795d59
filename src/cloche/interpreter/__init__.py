"""The guest's side: what runs inside the sandbox. Standard library only, and as little of it as can be."""
