"""The ranks of a job end together, under any launcher."""
