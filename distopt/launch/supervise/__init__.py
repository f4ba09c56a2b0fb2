"""The processes that one process starts as ranks, and supervises until all have ended."""
