"""Records of a rank: its last collectives, the time of each part of a step, and the cost of all that it sends.

- `ring`, `flight`: the flight record. Each rank has a ring of records in an anonymous file. The ranks of a host and
  their supervisor open each other's rings through /proc, so any of them can write the records of all, also of a rank
  that hangs or was killed. They do when a rank fails, and when one gets SIGQUIT, in the format of PyTorch's recorder,
  beside Python's stacks. The analysis is `python -m torch.distributed.flight_recorder.fr_trace FOLDER`.
- `timeline`: bars in a file, where transfers end at the time in the ring; and the counts in the ring's head, which
  `distopt run --watch` reads.
- `statistics`: sums by bucket, which `stats()` returns.

Each event is reported at one place, by one reading of the clock. The fronts report the phases of a step.
`codecs.reduction` reports the parts of a reduction and the waits for its collectives, to timeline and statistics. The
queue of a process group of PyTorch reports its operations, which have no statistics.

Imports the errors, settings and native functions of distopt. Never knows which transport carries an operation out. Its
functions are local unless they say Collective.
"""
