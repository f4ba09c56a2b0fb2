"""The summary of made-up timelines, the bounds of clocks, and what happens without a timeline or where none can be."""

import json
import multiprocessing
import re
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest

from distopt.cli import main
from distopt.cli.timeline import findings, load, report, summarize
from distopt.errors import DataError
from distopt.recorder import timeline as recorder
from distopt.recorder.flight import FlightRecord
from distopt.recorder.ring import Ring
from distopt.recorder.timeline import TRACKS, Timeline
from tests.unit.refusals import refused

STEPS, STEP_US = 9, 10_000
FORWARD, BACKWARD, ENCODE, DECODE, UPDATE = 1000, 3000, 200, 100, 50  # us


def write(folder: Path, rank: int, *, late=0, host="a", low=0, high=0, pid=1, attempt=0) -> None:
    """A rank that waits until the last one of all, `late` us after the first, has sent."""
    shift = (low + high) // 2000
    about = {"rank": rank, "host": host, "low_ns": low, "high_ns": high, "began": pid, "attempt": [0, attempt]}
    events = [{"name": "clock", "args": about}]
    sent = FORWARD + BACKWARD - 1000
    bars = [
        ("forward", 0, FORWARD, 0, {}),
        ("encode", sent - ENCODE, ENCODE, 0, {"bucket": "b"}),
        ("backward", FORWARD, BACKWARD, 0, {}),
        ("wire", sent, 5000 - late, 1, {"bucket": "b"}),
        ("wait", sent + 1000, 4000 - late, 0, {"bucket": "b"}),
        ("decode", sent + 5000 - late, DECODE, 0, {"bucket": "b"}),
        ("update", sent + 5200 - late, UPDATE, 0, {}),
    ]
    for step in range(STEPS):
        start = shift + pid * 1_000_000 + step * STEP_US + late
        events += [{"name": n, "ph": "X", "ts": start + at, "dur": d, "tid": t, "args": a} for n, at, d, t, a in bars]
    for event in events:
        event |= {"ph": event.get("ph", "M"), "pid": rank + 1, "tid": TRACKS * (rank + 1) + event.get("tid", 0)}
    lines = "".join(json.dumps(event) + ",\n" for event in events)
    (folder / f"rank-{rank}-{pid}.json").write_text(f"[\n{lines}" + '{"name": "cut')


def test_parts_of_a_step_are_those_made_up(tmp_path):
    write(tmp_path, 0)
    write(tmp_path, 1)
    summary = summarize(load(tmp_path))
    parts = {"forward": 1.0, "backward": 2.8, "encode": 0.2, "wait": 4.0, "decode": 0.1, "update": 0.05, "other": 1.85}
    assert list(summary.ms.values()) == [pytest.approx(parts)] * 2
    assert summary.hidden == pytest.approx({0: 0.2, 1: 0.2})
    assert "All ranks wait, for 40% of a step" in report(load(tmp_path))


@pytest.mark.parametrize("slow", [0, 2])
def test_the_rank_that_the_others_wait_for_is_named(tmp_path, slow):
    for rank in range(4):
        write(tmp_path, rank, late=3000 if rank == slow else 10 * rank)
    ranks = load(tmp_path)
    summary = summarize(ranks)
    assert summary.last == {rank: float(rank == slow) for rank in range(4)}
    assert summary.late[slow] == pytest.approx(2.98, abs=0.02)
    found = rf"Rank {slow} is the last to send in 100% of the steps.*The others wait for it\."
    assert re.match(found, findings(ranks, summary)[0])


def test_no_rank_is_blamed_within_the_error_of_the_clocks(tmp_path):
    write(tmp_path, 0)
    write(tmp_path, 1, late=3000, host="b", low=-4_000_000, high=4_000_000)
    assert "No rank keeps the others waiting." in report(load(tmp_path))
    write(tmp_path, 2, late=3000, host="b", low=-1_000_000, high=5_000_000)  # the same clock, known better: -1 to 4 ms
    ranks = load(tmp_path)
    assert (ranks[1].shift, ranks[1].error) == (ranks[2].shift, ranks[2].error) == (1500, 2500)


def test_a_rank_that_was_started_again_heals_in_between_which_counts_for_no_step(tmp_path):
    (tmp_path / "later").mkdir()
    write(tmp_path, 0, pid=1)
    write(tmp_path, 0, pid=2, attempt=1)
    rank = load(tmp_path)[0]
    (healing,) = rank.named("healing")
    others = [bar for bar in rank.events if 0 < bar.get("ts", 0) < healing["ts"] + 1 and bar != healing]
    assert healing["ts"] == max(bar["ts"] + bar["dur"] for bar in others) == 2_000_000 - healing["dur"]
    assert {bar["tid"] for bar in rank.named("wire")} == {TRACKS + 1, TRACKS + 1 + TRACKS // 10}
    for rank in range(2):
        write(tmp_path / "later", rank)
        write(tmp_path / "later", rank, pid=46, attempt=1)  # 45 s later
    ranks = load(tmp_path / "later")
    summary = summarize(ranks)
    assert all(44 < seconds < 45 for seconds in summary.healing.values())
    assert all(ms["other"] < 3 for ms in summary.ms.values())
    for text in ("Healing took 44.9", "All ranks wait"):
        assert text in report(ranks)


@pytest.mark.parametrize("attempts", [(0, 0), (0, 1, 0), (0, 1, 1)])
def test_folders_without_timelines_and_two_jobs_of_one_folder_are_refused(attempts, tmp_path, capsys):
    for action in ("merge", "summary", "plot"):
        assert main(["timeline", action, str(tmp_path)]) == 1
        assert "there is no timeline in" in capsys.readouterr().err
    (tmp_path / "rank-0-1.json").write_text("[\n{},\n")
    refused(DataError, "is no timeline of distopt", load, tmp_path)
    write(tmp_path, 0)
    for pid, attempt in enumerate(attempts):
        write(tmp_path, 1, pid=pid, attempt=attempt)
    refused(DataError, r"several jobs, as of rank 1; keep each job in a folder of its own", load, tmp_path)


@pytest.mark.slow
def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path, 0)
    write(tmp_path, 1)
    assert main(["timeline", "plot", str(tmp_path)]) == 0
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("lead_ns", [-(10**12), 0, 7 * 10**9])
def test_the_bounds_of_a_clock_hold_however_long_messages_take(lead_ns):
    delays = iter([0.003, 0.001, 0.0002, 0.002] * 20)
    arrived_there = 0

    def exchange(mine: bytes) -> list[bytes]:  # with a first rank whose clock is `lead_ns` behind
        nonlocal arrived_there
        sent_there, told = time.monotonic_ns() - lead_ns, arrived_there
        time.sleep(next(delays))
        arrived_there = time.monotonic_ns() - lead_ns
        time.sleep(0.0001)
        return [struct.pack("=qq", sent_there, told), mine]

    low, high = recorder._clock(exchange)
    assert low <= lead_ns <= high


def test_without_a_timeline_nothing_is_recorded_and_without_memory_there_is_one_notice(monkeypatch, caplog):
    monkeypatch.delenv("DISTOPT_TIMELINE", raising=False)
    off = Timeline()
    off.open(0, ["a"], lambda _: pytest.fail("nothing is exchanged"))
    off.phase("forward")
    with off.span("save"), off.wait("all_reduce"):
        pass
    assert (off.is_on, off.phase_now) == (False, "")
    monkeypatch.setattr("os.memfd_create", Mock(side_effect=OSError(24, "Too many open files")))
    record = FlightRecord()
    assert [record.offer()["ring"] for _ in range(2)] == [None, None]
    assert record.open_group("world", [0, 1], 0, [record.offer()] * 2) is None
    assert record.write("a reason") == ""
    assert caplog.text.count("there is no flight record") == 1


def test_a_full_disk_ends_the_timeline_with_one_notice(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("DISTOPT_TIMELINE", str(tmp_path))
    made = Timeline()
    made.open(0, ["a"], lambda _: [])
    made._file.close()
    with Path("/dev/full").open("wb", buffering=0) as made._file:
        for second in range(1, 4):
            made.add("update", 0.0, time.perf_counter() + second)
    made.phase("forward")
    assert (made.is_on, made.phase_now) == (False, "")
    assert caplog.text.count("the timeline cannot be written") == 1


def save_and_wait(sender: Connection) -> None:
    """As a rank that waits for the stacks of others when it has saved its record."""
    Ring.stacks = lambda _: time.sleep(100.0)
    record = FlightRecord()
    record.open_group("world", [0, 1], 0, [offer := record.offer()])
    sender.send(offer)
    record.write("the cause")


def test_a_rank_that_is_ended_before_it_writes_its_stacks_leaves_them_to_its_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTOPT_FLIGHT_FOLDER", str(tmp_path))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    rank = multiprocessing.get_context("spawn").Process(target=save_and_wait, args=(sender,), daemon=True)
    rank.start()
    launcher = FlightRecord()
    launcher.add(receiver.recv()["ring"])
    while not (tmp_path / "rank_0").exists():
        time.sleep(0.01)
    assert launcher.write("the end of a rank") == str(tmp_path)
    rank.kill()
    rank.join()
    assert "in save_and_wait" in (tmp_path / "stacks-0.txt").read_text()
