"""The reference CNN, and the model of time over message size and number of ranks."""
