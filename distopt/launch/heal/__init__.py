"""How ranks start again where they were: from states in memory, forked from a warm process.

Imports `end_together` and `launchers`. Never knows when ranks are started again: `agents` decides that.
"""
