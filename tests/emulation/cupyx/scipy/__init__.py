"""See `cupyx`."""
