"""How a process finds its rank and its peers: launchers, rendezvous, and the first exchange of bytes."""
