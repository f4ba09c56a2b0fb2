"""What each launcher says to the processes that it starts."""
