"""The ranks of a job end together, under any launcher: each notices the end of the others, and reports its own.

Who notices the end of a rank, and who ends the others, depends on what has started the ranks:

- `launch.main`, `spawn` and `distopt run`: the parent of the rank, which ends its other ranks by signals; agents of
  several nodes tell each other. A rank gives its parent the reason through a pipe (`report`).
- torchrun, srun and others, without MPI: a process that rank 0 has started (`server`), by the end of a connection that
  each rank keeps open (`lifeline`). It notifies all ranks, and each ends itself.
- mpiexec, and srun with a plugin for MPI: the same server, and the launcher. A rank that leaves early must not count as
  a success, nor wait in MPI_Finalize forever: `exit_guard` makes each such end an MPI_Abort.
- multiprocessing, by a script: no process. While they join, ranks look for the others in /proc (`siblings`); later,
  shared memory shows which process has ended.

A rank whose parent is killed ends, too (`parent`).

Imports only modules beside this package. Never knows how a rank found its job.
"""
