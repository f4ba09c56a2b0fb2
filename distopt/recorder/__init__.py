"""The recorders: the flight record, and the timeline.

The flight record is the last collectives of every rank, in memory that the other processes of its host can read. Each
rank has a ring of records in an anonymous file (`ring`). The ranks of a host and their supervisor open each other's
rings through /proc, so any of them can write the records of all, also of a rank that hangs or was killed (`flight`).
They do when a rank fails, and when one gets SIGQUIT, in the format of PyTorch's recorder, beside Python's stacks. The
analysis is `python -m torch.distributed.flight_recorder.fr_trace FOLDER`.

The timeline has the begin and the end of the phases of each step, and of its collectives (`timeline`).

Imports the errors and settings of distopt. Never knows which transport carries an operation out. Its functions are
local unless they say Collective.
"""
