"""How ranks meet whose launcher only numbers them: from its variables, to one key per job."""

import os

import pytest

from distopt.errors import LaunchError
from distopt.launch.launchers import launcher
from distopt.launch.rendezvous import mpi
from distopt.launch.rendezvous.meeting import meeting
from distopt.launch.rendezvous.member import ports

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-12,20],other",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_CLUSTER_NAME": "here",
}


def of(env):
    found = meeting(launcher(env), env)
    assert found is not None
    return found


@pytest.mark.parametrize("env", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_every_rank_has_the_key_of_the_job_and_no_other_job_has_it(env):
    rank, place = ("RANK", "LOCAL_RANK") if env is TORCHRUN else ("SLURM_PROCID", "SLURM_LOCALID")
    key = of(env).key
    assert of(env | {rank: "2", place: "0"}).key == key
    changes = (
        [("MASTER_PORT", "29501"), ("TORCHELASTIC_RUN_ID", "b"), ("TORCHELASTIC_RESTART_COUNT", "1")]
        if env is TORCHRUN
        else [("SLURM_JOB_ID", "72"), ("SLURM_STEP_ID", "1"), ("SLURM_RESTART_COUNT", "1")]
    )
    keys = {of(env | {name: value}).key for name, value in [*changes, ("DISTOPT_JOB_SECRET", "s")]}
    assert len(keys | {key}) == 5
    assert len({tuple(ports(one)) for one in keys | {key}}) == 5
    assert all(20_000 <= port < 32_000 for port in ports(key))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[07-12,20],other", "node07"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("n-1.cluster", "n-1.cluster"),
    ],
)
def test_first_node_of_slurms_list(nodes, first):
    assert of(SRUN | {"SLURM_STEP_NODELIST": nodes}).address == first


def test_attempts_of_distopt_run_never_meet():
    env = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none_1a", "DISTOPT_RUN_ID": "none_1a"}
    other = {"TORCHELASTIC_RUN_ID": "none_2b", "DISTOPT_RUN_ID": "none_2b"}
    changes = [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"DISTOPT_JOB_SECRET": "s"}, other, {"DISTOPT_RUN_ID": "x"}]
    assert len({of(env | change).key for change in [{}, *changes]}) == 5


def test_one_host_is_known():
    assert of(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).one_host
    assert of(TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}).one_host
    assert not of(SRUN).one_host
    assert not of(TORCHRUN).one_host
    assert of(TORCHRUN).address == "host7"


@pytest.mark.parametrize(
    ("env", "missing"),
    [(TORCHRUN, "MASTER_PORT"), (TORCHRUN, "MASTER_ADDR"), (SRUN, "SLURM_JOB_ID"), (SRUN, "SLURM_STEP_NODELIST")],
)
def test_missing_variable_is_named(env, missing):
    with pytest.raises(LaunchError, match=f"{missing} is not set"):
        of({name: value for name, value in env.items() if name != missing})


def test_mpiexec_connects_its_ranks_itself():
    env = {"PMI_RANK": "3", "PMI_SIZE": "8"}
    assert meeting(launcher(env), env) is None


@pytest.mark.parametrize(
    ("env", "name", "rank"),
    [
        (SRUN | {"WORLD_SIZE": "8", "MASTER_ADDR": "x"}, "srun", 3),  # a job script exports them
        (SRUN | {"RANK": "0"}, "srun", 3),
        (SRUN | {"RANK": "3", "WORLD_SIZE": "8"}, "srun", 3),  # set by hand from Slurm's
        (SRUN | {"RANK": "5", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x"}, "torchrun", 5),  # a task is the agent
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_JOBID": "71.0"}, "srun", 3),  # --mpi=pmi2
        (
            SRUN
            | {"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_JOBID": "71.0"}
            | {"RANK": "5", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x"},
            "torchrun",
            5,
        ),
        (SRUN | {"RANK": "5", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x", "DISTOPT_RUN_ID": "x"}, "distopt run", 5),
        (  # torchrun within distopt run
            {"RANK": "5", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "y", "DISTOPT_RUN_ID": "x"},
            "torchrun",
            5,
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}, "mpiexec of MPICH or Intel MPI", 1),
    ],
)
def test_innermost_launcher_counts(env, name, rank):
    info = launcher(env)
    assert info is not None
    assert (info.name, info.rank) == (name, rank)


MPICH, OPEN_MPI = "MPICH Version: 5.0.2", "Open MPI v5.0.11"
PMI2, PMIX = {"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_JOBID": "71.0"}, {"PMIX_RANK": "3"}


@pytest.mark.parametrize(
    ("env", "library", "connected"),
    [
        (SRUN | PMI2, MPICH, True),
        (SRUN | PMIX, OPEN_MPI, True),
        (SRUN | PMIX, MPICH, False),  # the plugin for another library
        (SRUN | PMI2, "", False),  # none is installed
        (SRUN, MPICH, False),
        (SRUN | PMI2 | {"SLURM_STEP_NUM_NODES": "1"}, MPICH, False),  # one host: shared memory
        (SRUN | PMI2 | TORCHRUN, MPICH, False),  # a task is the agent
        (TORCHRUN, MPICH, False),
        (PMI2, MPICH, True),  # mpiexec
    ],
)
def test_mpi_is_for_mpiexec_and_for_srun_with_the_plugin_of_the_library(monkeypatch, env, library, connected):
    monkeypatch.setattr(mpi, "_installed", lambda: library)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PMI"))]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert mpi.is_mpi_job(launcher()) == connected
