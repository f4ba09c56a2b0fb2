"""Libraries that take turns in one run, each in processes and, where needed, a virtual environment of its own."""
