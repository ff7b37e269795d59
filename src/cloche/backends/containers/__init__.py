"""What backends share whose runs are containers: the first process inside, the talk with it, and its results."""
