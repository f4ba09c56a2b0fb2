"""How ranks start again where they were: from states in memory, forked from a warm process."""
