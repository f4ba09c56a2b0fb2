"""Variables of launchers: what a process finds in them, with traps and garbage, how its job meets; and of settings."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt import comm, launch
from distopt.errors import LaunchError, UsageError
from distopt.launch.launchers import launcher
from distopt.launch.launchers.srun import unstarted_tasks
from distopt.launch.launchers.submitit import Submitit
from distopt.launch.rendezvous import mpi
from distopt.launch.rendezvous.meeting import meeting
from distopt.launch.rendezvous.member import ports
from distopt.settings import Settings
from tests.unit.refusals import refused

OMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}
OMPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
PLACE = {"MASTER_ADDR": "host7", "MASTER_PORT": "29500"}
PLACE |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
STEP = {"SLURM_JOB_ID": "71", "SLURM_CLUSTER_NAME": "here", "SLURM_STEP_NUM_NODES": "2"}
STEP |= {"SLURM_STEP_NODELIST": "node[07-12,20],other"}
# The shell of salloc is a step of one task (LaunchParameters=use_interactive_step).
SALLOC = SBATCH | {"SLURM_STEP_ID": "4294967290"}
A_DAEMON = SRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
SUBMITIT = {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_LOCALID": "1"}
OF_SUBMITIT = SUBMITIT | {"SUBMITIT_LOCAL_JOB_ID": "71", "SUBMITIT_LOCAL_COMMAND": "python -m submitit"}
HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
GLOO = "HOROVOD_GLOO_RENDEZVOUS"
STORE = {f"{GLOO}_ADDR": "10.0.0.1", f"{GLOO}_PORT": "4711"}
AGENT = {"RANK": "5", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x"}
OF_RUN = {"DISTOPT_RUN_ID": "x"}
PMI2, PMIX = {"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_JOBID": "71.0"}, {"PMIX_RANK": "3"}

OF_MPICH, OF_OPEN_MPI = "mpiexec of MPICH or Intel MPI", "mpiexec of Open MPI"
# By the variables: the launcher, rank, size, local rank and local size; or that there is none.
STARTED = [
    (OMPI, (OF_OPEN_MPI, 3, 8, 1, 2)),
    (PMI, (OF_MPICH, 3, 8, 1, 2)),
    (TORCHRUN, ("torchrun", 3, 8, 1, 2)),
    (SRUN, ("srun", 3, 8, 1, None)),
    (OF_SUBMITIT, ("submitit", 1, 2, 1, 2)),
    (HOROVOD | STORE, ("horovodrun", 1, 2, 1, 2)),
    ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (OF_MPICH, 0, 1, None, None)),
    # Several that agree are one, the innermost; a task may be the daemon of another launcher.
    (OMPI | PMI, (OF_OPEN_MPI, 3, 8, 1, 2)),
    *[(others | PMI, (OF_MPICH, 3, 8, 1, 2)) for others in (A_DAEMON, SUBMITIT, HOROVOD, SALLOC)],
    (SALLOC | OMPI, (OF_OPEN_MPI, 3, 8, 1, 2)),
    (SALLOC | TORCHRUN, ("torchrun", 3, 8, 1, 2)),
    (SRUN | {"WORLD_SIZE": "8", "MASTER_ADDR": "x"}, ("srun", 3, 8, 1, None)),  # a job script exports them
    (SRUN | {"RANK": "0"}, ("srun", 3, 8, 1, None)),
    (SRUN | {"RANK": "3", "WORLD_SIZE": "8"}, ("srun", 3, 8, 1, None)),  # set by hand from Slurm's
    (SRUN | AGENT, ("torchrun", 5, 16, None, None)),  # a task is the agent
    (SRUN | PMI2, ("srun", 3, 8, 1, None)),  # --mpi=pmi2
    (SRUN | PMI2 | AGENT, ("torchrun", 5, 16, None, None)),
    (SRUN | AGENT | OF_RUN, ("distopt run", 5, 16, None, None)),
    (AGENT | {"TORCHELASTIC_RUN_ID": "y"} | OF_RUN, ("torchrun", 5, 16, None, None)),  # torchrun within distopt run
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}, (OF_MPICH, 1, 2, None, None)),
    *[(env, None) for env in ({"PATH": "/bin"}, {"WORLD_SIZE": "2"}, SBATCH, SALLOC)],
    (SUBMITIT | {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"}, None),
]


@pytest.mark.parametrize(("env", "expected"), STARTED)
def test_the_innermost_launcher_says_rank_size_and_place(env, expected):
    info = launcher(env)
    found = info and (info.name, info.rank, info.size, info.local_rank, info.local_size)
    assert found == expected
    if any(env is one for one in (OMPI, PMI, TORCHRUN)):
        assert all(f"{name}={value}" in info.source for name, value in env.items())


def test_tasks_of_a_job_script_that_nobody_started():
    assert unstarted_tasks(SBATCH) == unstarted_tasks(SALLOC) == 8
    assert unstarted_tasks(SRUN) == unstarted_tasks({"SLURM_NTASKS": "many"}) == 0


STRANGE = [" 1", "1.0", "\N{ARABIC-INDIC DIGIT THREE}", "9" * 10]


@pytest.mark.parametrize(
    ("env", "named"),
    [
        *((PMI | {"PMI_RANK": text}, [f"PMI_RANK='{text}'"]) for text in ("", "x", "-1", *STRANGE)),
        (PMI | {"PMI_SIZE": "1_0"}, ["PMI_SIZE='1_0'"]),
        (PMI | {"PMI_RANK": "8"}, ["PMI_RANK=8", "PMI_SIZE=8"]),
        (PMI | {"PMI_SIZE": "0", "PMI_RANK": "0"}, ["PMI_SIZE=0"]),
        ({"RANK": "1"}, ["RANK='1'", "WORLD_SIZE"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9", "WORLD_SIZE=8"]),
        (TORCHRUN | PMI | {"PMI_RANK": "2"}, ["two launchers disagree", "RANK=3", "PMI_RANK=2"]),
        (OMPI | PMI | {"PMI_SIZE": "9"}, ["OMPI_COMM_WORLD_SIZE=8", "PMI_SIZE=9"]),
    ],
)
def test_garbage_and_contradictions_name_variables_and_values(env, named):
    said = str(refused(LaunchError, "", launcher, env))
    assert all(text in said for text in named), said


NAMES = sorted({*OMPI, *PMI, *TORCHRUN, *SRUN})
VALUES = st.integers(-2, 12).map(str) | st.text(max_size=12) | st.sampled_from(STRANGE)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_environment_gives_an_answer_or_a_launch_error(env):
    try:
        info = launcher(env)
    except LaunchError as caught:
        assert any(name in str(caught) for name in env)  # noqa: PT017 - either is right
    else:
        assert info is None or 0 <= info.rank < info.size


def met(env):
    return meeting(launcher(env), env)


# By the variables: the host of rank 0; empty where all ranks are known to share one host.
MET = [
    (TORCHRUN | PLACE, "host7"),
    (SRUN | STEP, "node07"),
    *[
        (SRUN | STEP | {"SLURM_STEP_NODELIST": nodes}, first)
        for nodes, first in {"a,b[1-2]": "a", "rack[1-2]node[3-4]": "rack1node3", "n-1.cluster": "n-1.cluster"}.items()
    ],
    (HOROVOD | STORE | {"HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}, "10.0.0.1"),
    (SRUN | STEP | {"SLURM_STEP_NUM_NODES": "1"}, ""),
    (TORCHRUN | PLACE | {"LOCAL_WORLD_SIZE": "8"}, ""),
    (OF_SUBMITIT, ""),
    (HOROVOD | STORE, ""),
]


@pytest.mark.parametrize(("env", "host"), MET)
def test_one_host_is_known_or_the_host_of_rank_0(env, host):
    found = met(env)
    assert ("" if found.one_host else found.address) == host


RUN = TORCHRUN | PLACE | {"TORCHELASTIC_RUN_ID": "none_1a", "DISTOPT_RUN_ID": "none_1a"}
OF_TORCHRUN = {"MASTER_PORT": "29501", "TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "1"}
OF_SRUN = {"SLURM_JOB_ID": "72", "SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "1"}
OTHER_RUNS = [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"DISTOPT_RUN_ID": "x"}]
OTHER_RUNS += [{"TORCHELASTIC_RUN_ID": "none_2b", "DISTOPT_RUN_ID": "none_2b"}]
# By the variables: those of another rank of the job, and one after the other those of other jobs or attempts.
KEYS = {
    "torchrun": (TORCHRUN | PLACE, {"RANK": "2", "LOCAL_RANK": "0"}, [{k: v} for k, v in OF_TORCHRUN.items()]),
    "srun": (SRUN | STEP, {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, [{k: v} for k, v in OF_SRUN.items()]),
    "distopt run": (RUN, {"RANK": "2", "LOCAL_RANK": "0"}, OTHER_RUNS),
    "horovodrun": (HOROVOD | STORE, {"HOROVOD_RANK": "0", "HOROVOD_LOCAL_RANK": "0"}, [{f"{GLOO}_PORT": "4712"}]),
}


@pytest.mark.parametrize("name", KEYS)
def test_every_rank_has_the_key_of_the_job_and_no_other_job_has_it(name):
    env, of_rank, others = KEYS[name]
    key = met(env).key
    assert met(env | of_rank).key == key
    keys = {key, *(met(env | other).key for other in [*others, {"DISTOPT_JOB_SECRET": "s"}])}
    assert len(keys) == len({tuple(ports(one)) for one in keys}) == len(others) + 2
    assert all(20_000 <= port < 32_000 for port in ports(key))


def test_missing_variable_is_named():
    needed = [(TORCHRUN | PLACE, name) for name in ("MASTER_PORT", "MASTER_ADDR")]
    needed += [(SRUN | STEP, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST")]
    for env, missing in (*needed, (HOROVOD | STORE, f"{GLOO}_ADDR")):
        refused(LaunchError, f"{missing} is not set", met, {name: env[name] for name in env if name != missing})


def test_a_launcher_without_an_address_is_for_one_host():
    refused(LaunchError, "submitit names no host of rank 0", Submitit().host_of_rank_0, OF_SUBMITIT)


MPICH, OPEN_MPI = "MPICH Version: 5.0.2", "Open MPI v5.0.11"


@pytest.mark.parametrize(
    ("env", "library", "connected"),
    [
        (SRUN | STEP | PMI2, MPICH, True),
        (SRUN | STEP | PMIX, OPEN_MPI, True),
        (SRUN | STEP | PMIX, MPICH, False),  # the plugin for another library
        (SRUN | STEP | PMI2, "", False),  # none is installed
        (SRUN | STEP, MPICH, False),
        (SRUN | STEP | PMI2 | {"SLURM_STEP_NUM_NODES": "1"}, MPICH, False),  # one host: shared memory
        (SRUN | STEP | PMI2 | TORCHRUN | PLACE, MPICH, False),  # a task is the agent
        (TORCHRUN | PLACE, MPICH, False),
        (PMI2, MPICH, True),  # mpiexec
    ],
)
def test_mpi_is_for_mpiexec_and_for_srun_with_the_plugin_of_the_library(monkeypatch, env, library, connected):
    monkeypatch.setattr(mpi, "_installed", lambda: library)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PMI"))]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert meeting(launcher(PMI2), PMI2) is None
    assert mpi.is_mpi_job(launcher()) == connected


def test_an_unknown_transport_is_refused(monkeypatch):
    monkeypatch.setenv("DISTOPT_TRANSPORT", "none of these")
    refused(UsageError, "unknown transport 'none of these'", lambda: comm.create(launch.join()))


def test_variables_of_the_users_own_are_none_of_ours():
    assert Settings.from_env({"DISTOPT_EXPERIMENT": "7", "DISTOPT_DATA_DIR": "/data"}) == Settings()


def test_ranges_of_ports_and_what_is_none():
    for text, expected in (("24000-24099", range(24000, 24100)), ("1-65535", range(1, 65536)), ("7-7", range(7, 8))):
        assert Settings.from_env({"DISTOPT_PORTS": text}).ports == expected
    assert Settings.from_env({"DISTOPT_PORTS": ""}).ports is None
    for text in ("24000", "24099-24000", "0-9", "1-65536", "a-b", "1-2-3", "-1-5", "1 - 2", "1-", "1_0-20"):
        with pytest.raises(UsageError, match=r"DISTOPT_PORTS=.* is not a range of TCP ports, such as 24000-24099"):
            Settings.from_env({"DISTOPT_PORTS": text})


@pytest.mark.parametrize("count", [1, 3, 8, 9, 1000])
def test_the_server_listens_in_the_range(monkeypatch, count):
    monkeypatch.setenv("DISTOPT_PORTS", f"24000-{23999 + count}")
    tried = [ports(bytes([i]) * 32) for i in range(50)]
    assert {port for one in tried for port in one} <= set(range(24000, 24000 + count))
    assert all(len(set(one)) == len(one) >= min(count, 2) for one in tried)
    assert count > 8 or all(len(one) == count for one in tried)  # all of a small range
