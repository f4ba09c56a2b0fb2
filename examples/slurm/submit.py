"""Submit the training by submitit: python examples/slurm/submit.py --nodes 2 --tasks-per-node 8 -- --checkpoint DIR

Options of examples/mnist_slurm.py follow the --. pip install submitit
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

try:
    import submitit
except ModuleNotFoundError as error:
    sys.exit(f"submit.py: error: {error}; pip install submitit")

from distopt import launch

EXAMPLES = str(Path(__file__).resolve().parents[1])


class Training:
    """One rank of the job. submitit pickles this object, and calls it in every task of its srun.

    `Checkpoint(preemptible=True)` catches the signal of submitit on all ranks. When they have saved, it hands the
    signal on to submitit, which calls `checkpoint` on rank 0 and has Slurm queue the job again.
    """

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv

    def __call__(self) -> None:
        sys.path.insert(0, EXAMPLES)
        import mnist_slurm

        launch.main(mnist_slurm.train_mnist, args=(mnist_slurm.parse_args(self.argv),))

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """The job to queue again: the same, since it resumes from its checkpoint by itself."""
        return submitit.helpers.DelayedSubmission(self)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--tasks-per-node", type=int, default=8)
    parser.add_argument("--minutes", type=int, default=30, help="time limit")
    parser.add_argument("--partition")
    parser.add_argument("--wait", action="store_true", help="until the job has ended")
    parser.add_argument("--folder", default="submitit", help="for logs, on a file system that all nodes see")
    parser.add_argument("options", nargs="*", help="options of examples/mnist_slurm.py, after --")
    args = parser.parse_args()
    sys.path.insert(0, EXAMPLES)
    import mnist_slurm

    mnist_slurm.parse_args(args.options)  # a mistake is reported now, not by the job
    if shutil.which("sbatch") is None:
        parser.error("there is no Slurm here (no sbatch)")

    executor = submitit.AutoExecutor(args.folder, cluster="slurm")
    executor.update_parameters(
        name="mnist",
        nodes=args.nodes,
        tasks_per_node=args.tasks_per_node,
        cpus_per_task=1,
        timeout_min=args.minutes,
        slurm_partition=args.partition,
        slurm_signal_delay_s=60,
    )
    job = executor.submit(Training(args.options))
    print(f"job {job.job_id}; rank 0 writes to {job.paths.stdout}", flush=True)
    if args.wait:
        job.results()  # raises if a rank has failed


if __name__ == "__main__":
    main()
