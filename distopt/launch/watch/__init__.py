"""The ranks of a job end together, whatever started them."""
