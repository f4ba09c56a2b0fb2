"""Jobs of Slurm, by submitit."""

import contextlib
import io
import subprocess

import loop
import submitit
import torch
from parts import HERE

from distopt.errors import UsageError


def submit(args) -> submitit.Job:
    executor = submitit.AutoExecutor(args.out / "submitit", cluster="slurm", slurm_max_num_timeout=1000)
    executor.update_parameters(
        name=f"{args.arch}-{args.dataset}",
        nodes=args.slurm_nnodes,
        tasks_per_node=args.slurm_ngpus or args.slurm_ncpus,
        gpus_per_node=args.slurm_ngpus or None,
        cpus_per_task=args.slurm_threads,
        timeout_min=args.slurm_minutes,
        slurm_partition=args.slurm_partition,
        slurm_nodelist=args.slurm_nodelist,
        slurm_signal_delay_s=60,  # in which the checkpoint of a job that is out of time must be written
        slurm_additional_parameters={"requeue": True},
        slurm_setup=[f"export PYTHONPATH={HERE}:$PYTHONPATH"],
    )
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where submitit repeats what sbatch says
            job = executor.submit(Rank(args))
    except submitit.core.utils.FailedJobError as error:
        command = ["sinfo", "--noheader", "--format=%R (nodes %N, GPUs %G)"]
        there = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        raise UsageError(f"{error}; there are {', '.join(there)}".replace("\nsbatch: error:", ";")) from None
    print(f"job {job.job_id}; rank 0 writes to {args.out}/logs/rank-0.log", flush=True)
    return job


class Rank(submitit.helpers.Checkpointable):
    """submitit pickles this, and calls it in every task of the job.

    The checkpoint catches Slurm's signals. When all ranks have saved, it hands submitit's own on: submitit then has
    Slurm queue the job again, which resumes from the checkpoint.
    """

    def __init__(self, args) -> None:
        self.args = args

    def __call__(self) -> None:
        job = submitit.JobEnvironment()
        device = torch.device("cuda", job.local_rank) if self.args.slurm_ngpus else torch.device("cpu")
        torch.set_num_threads(self.args.slurm_threads)  # elsewhere, `launch.main` has set it
        port = 20000 + int(job.raw_job_id) % 12000  # below those of clients, from 32768
        loop.run(job.global_rank, job.num_tasks, device, f"tcp://{job.hostnames[0]}:{port}", self.args)
