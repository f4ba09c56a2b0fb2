"""Who am I, and where are the others: launchers, meeting places, and the first exchange of bytes."""
