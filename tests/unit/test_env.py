"""The launcher's variables: table, traps, and garbage that must never crash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt.errors import LaunchError, UsageError
from distopt.launch.launchers import launcher
from distopt.launch.launchers.srun import unstarted_tasks
from distopt.launch.rendezvous.meeting import meeting

OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
SALLOC = SBATCH | {
    "SLURM_STEP_ID": "4294967290"
}  # its shell, a step of one task (LaunchParameters=use_interactive_step)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (OMPI, (3, 8, 1, 2)),
        (PMI, (3, 8, 1, 2)),
        (TORCHRUN, (3, 8, 1, 2)),
        (SRUN, (3, 8, 1, None)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 1, None, None)),
    ],
    ids=["ompi", "pmi", "torchrun", "srun", "without local variables"],
)
def test_launcher_says_rank_size_and_place(env, expected):
    info = launcher(env)
    assert info is not None
    assert (info.rank, info.size, info.local_rank, info.local_size) == expected
    assert env is SRUN or all(f"{name}={value}" in info.source for name, value in env.items())


@pytest.mark.parametrize("others", [OMPI, SRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}], ids=["ompi", "a daemon"])
def test_launchers_that_agree_are_one_and_a_task_of_slurm_may_be_the_daemon_of_another(others):
    info = launcher(others | PMI)
    assert info is not None
    assert (info.rank, info.size) == (3, 8)


@pytest.mark.parametrize("env", [{"PATH": "/bin"}, {"WORLD_SIZE": "2"}, SBATCH, SALLOC])
def test_no_launcher(env):
    assert launcher(env) is None


SUBMITIT = {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_LOCALID": "1"}


def test_tasks_of_submitit_on_one_machine_are_ranks():
    info = launcher(SUBMITIT)
    assert info is not None
    assert (info.name, info.rank, info.size, info.local_rank, info.local_size) == ("submitit", 1, 2, 1, 2)
    found = meeting(info, SUBMITIT | {"SUBMITIT_LOCAL_JOB_ID": "71", "SUBMITIT_LOCAL_COMMAND": "python -m submitit"})
    assert found is not None
    assert found.one_host
    assert launcher(SUBMITIT | {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"}) is None
    inner = launcher(SUBMITIT | PMI)
    assert inner is not None
    assert (inner.rank, inner.size) == (3, 8)


HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
HOROVOD_STORE = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}


def test_ranks_of_horovodrun():
    info = launcher(HOROVOD)
    assert info is not None
    assert (info.name, info.rank, info.size, info.local_rank, info.local_size) == ("horovodrun", 1, 2, 1, 2)
    found = meeting(info, HOROVOD | HOROVOD_STORE)
    assert found is not None
    assert found.one_host
    of_another_job = meeting(info, HOROVOD | HOROVOD_STORE | {"HOROVOD_GLOO_RENDEZVOUS_PORT": "4712"})
    assert of_another_job is not None
    assert of_another_job.key != found.key
    with pytest.raises(LaunchError, match="HOROVOD_GLOO_RENDEZVOUS_ADDR is not set; start the job with horovodrun"):
        meeting(info, HOROVOD)
    across = HOROVOD | HOROVOD_STORE | {"HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
    info = launcher(across)
    assert info is not None
    found = meeting(info, across)
    assert found is not None
    assert (found.one_host, found.address) == (False, "10.0.0.1")
    inner = launcher(HOROVOD | PMI)
    assert inner is not None
    assert (inner.rank, inner.size) == (3, 8)


@pytest.mark.parametrize("inner", [OMPI, PMI, TORCHRUN])
def test_what_the_shell_of_salloc_starts_has_the_launcher_that_starts_it(inner):
    info = launcher(SALLOC | inner)
    assert info is not None
    assert (info.rank, info.size, info.source) == (3, 8, launcher(inner).source)


def test_tasks_of_a_job_script_that_nobody_started():
    assert unstarted_tasks(SBATCH) == unstarted_tasks(SALLOC) == 8
    assert unstarted_tasks(SRUN) == 0
    assert unstarted_tasks({"SLURM_NTASKS": "many"}) == 0


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (PMI | {"PMI_RANK": "x"}, ["PMI_RANK='x'"]),
        (PMI | {"PMI_RANK": "-1"}, ["PMI_RANK='-1'"]),
        (PMI | {"PMI_RANK": ""}, ["PMI_RANK=''"]),
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
    with pytest.raises(LaunchError) as caught:
        launcher(env)
    assert all(text in str(caught.value) for text in named), str(caught.value)


NAMES = sorted({*OMPI, *PMI, *TORCHRUN, *SRUN})
VALUES = st.one_of(
    st.integers(-2, 12).map(str),
    st.text(max_size=12),
    st.sampled_from(["", " 1", "1.0", "\N{ARABIC-INDIC DIGIT THREE}", "9" * 40]),
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_environment_gives_an_answer_or_a_launch_error(env):
    try:
        info = launcher(env)
    except LaunchError as caught:
        error = caught
    else:
        assert info is None or 0 <= info.rank < info.size
        return
    assert any(name in str(error) for name in env)


def test_the_former_names_work_in_this_version(monkeypatch, caplog):
    from distopt import codecs, comm, compress, launch

    assert compress.TopK is codecs.TopK
    monkeypatch.delenv("DISTOPT_TRANSPORT", raising=False)
    monkeypatch.setenv("DISTOPT_BACKEND", "single")
    assert comm.create(launch.join()).name == "single"
    assert caplog.text.count("DISTOPT_BACKEND is DISTOPT_TRANSPORT now") == 1
    monkeypatch.setenv("DISTOPT_TRANSPORT", "none of these")
    with pytest.raises(UsageError, match="unknown transport 'none of these'"):
        comm.create(launch.join())
