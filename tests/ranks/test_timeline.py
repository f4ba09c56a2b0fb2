"""Timelines of ranks of one host and of two, by both fronts, read back."""

import json
import subprocess
from pathlib import Path

import pytest

from distopt.cli import main
from distopt.cli.timeline import RankTimeline, load, summarize
from tests.processes import ROOT, RUN, Program, end_all
from tests.ranks.timeline_script import SLOW_SECONDS, STEPS

SCRIPT = str(ROOT / "tests" / "ranks" / "timeline_script.py")
LEAD_SECONDS = 5000  # of the second host's clock
BY_CODEC = ("encode", "wire", "wait", "decode")


def check_spans(ranks: dict[int, RankTimeline], parts: tuple[str, ...]) -> None:
    """Every bucket's spans on every rank, in order, and no bucket arrives anywhere before all ranks have sent it."""
    buckets = {event["args"]["bucket"] for event in ranks[0].named("wire")}
    assert len(buckets) > 1
    for bucket in buckets:
        spans = {number: [_of_bucket(rank, part, bucket) for part in parts] for number, rank in ranks.items()}
        for rows in spans.values():
            for events in zip(*rows, strict=True):
                of = dict(zip(parts, events, strict=True))
                wire, wait = of["wire"], of["wait"]
                assert wire["ts"] <= wire["ts"] + wire["dur"] <= wait["ts"] + wait["dur"] + 2
                if "encode" in of:
                    assert of["encode"]["ts"] + of["encode"]["dur"] == pytest.approx(wire["ts"], abs=2)
                    assert wait["ts"] + wait["dur"] == pytest.approx(of["decode"]["ts"], abs=2)
        error = 2 * max(rank.error for rank in ranks.values()) + 2
        for step in range(STEPS - 1):
            began = max(rows[0][step]["ts"] for rows in spans.values())
            wires = [rows[parts.index("wire")][step] for rows in spans.values()]
            assert began <= min(e["ts"] + e["dur"] for e in wires) + error


def _of_bucket(rank: RankTimeline, part: str, bucket: str) -> list[dict]:
    """One span for each step but the first, after which DDP changes its buckets; the last wait of each."""
    found = [e for e in rank.named(part) if e["args"].get("bucket") == bucket]
    each, rest = divmod(len(found), STEPS)
    if part == "wait" and each > 1:
        assert rest == 0
        found = found[each - 1 :: each]
    assert len(found) in (STEPS - 1, STEPS)
    return found[-(STEPS - 1) :]


def check_phases(ranks: dict[int, RankTimeline], phases: tuple[str, ...] = ("forward", "backward", "update")) -> None:
    for rank in ranks.values():
        names = [event["name"] for event in rank.events if event["name"] in phases]
        assert names[-3 * len(phases) :] == [*phases] * 3


def start(n: int, front: str, slow: int, folder: Path) -> Program:
    command = [*RUN, "--nproc-per-node", str(n), SCRIPT, front, str(slow)]
    return Program(command, {"DISTOPT_TIMELINE": str(folder)})


def run(front: str, slow: int, folder: Path, n: int = 2) -> dict[int, RankTimeline]:
    if front not in ("nn", "partial"):
        pytest.importorskip("torch")
    start(n, front, slow, folder).end(code=0)
    return load(folder)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("front", ["nn", "hook", "diloco"])
def test_fronts_record_their_buckets(tmp_path, front):
    """And those of the test on two hosts."""
    ranks = run(front, -1, tmp_path)
    assert [*ranks] == [0, 1]
    assert {rank.error for rank in ranks.values()} == {0}
    check_spans(ranks, BY_CODEC)
    if front != "diloco":  # which updates twice
        check_phases(ranks)
    assert main(["timeline", "merge", str(tmp_path)]) == 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if "name" in event["args"]]
    named = {(event["name"], event["pid"], event.get("tid"), event["args"]["name"]) for event in events}
    assert {name[3].split(",")[0] for name in named if name[0] == "process_name"} == {"rank 0", "rank 1"}
    assert ("thread_name", 2, 2000, "training") in named
    tracks = sum(name[0] == "thread_name" and name[3].startswith("bucket") for name in named)
    assert tracks > 2 or front == "diloco"  # whose buckets are those of fragments
    assert trace["otherData"]["clocks"] == "all ranks have one clock"


def test_the_slow_rank_is_named(tmp_path, capsys):
    slow = 2
    summary = summarize(run("nn", slow, tmp_path, 3))
    assert max(summary.last, key=summary.last.get) == slow
    assert summary.last[slow] > 0.5
    assert summary.ms[slow]["other"] > 1000 * SLOW_SECONDS / 2 > summary.ms[slow]["wait"]
    assert main(["timeline", "summary", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert f"Rank {slow} is the last to send" in told
    assert "The others wait for it." in told
    assert "Its other takes" in told


def test_waits_of_partial_updates_are_recorded(tmp_path, capsys):
    ranks = run("partial", 0, tmp_path)
    check_phases(ranks)
    waits = ranks[1].named("wait")
    assert sum(wait["dur"] for wait in waits) > STEPS * SLOW_SECONDS * 1e6 / 2
    assert len({wait["args"]["bucket"] for wait in waits}) > 1
    assert main(["timeline", "summary", str(tmp_path)]) == 0
    assert "All ranks wait" in capsys.readouterr().out


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize("front", ["nn", "ddp", "distopt"])
def test_the_clocks_of_two_hosts_are_aligned(net, tmp_path, front):
    if front != "nn":
        pytest.importorskip("torch")
    later = ["unshare", "--time", "--monotonic", str(LEAD_SECONDS), "--fork"]
    if subprocess.run([*later, "true"], check=False).returncode:
        pytest.skip("this kernel has no namespaces of clocks")
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:29400"]
    env = {"DISTOPT_TIMELINE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [*RUN, "--nproc-per-node", "2", *meet, SCRIPT, front, "-1"]
    clocks = zip(net.hosts, ([], later), strict=True)
    end_all(Program(host.inside([*clock, *command]), env) for host, clock in clocks)
    ranks = load(tmp_path)
    assert [rank.host for rank in ranks.values()] == [net.hosts[q // 2].name for q in range(4)]
    assert ranks[0].error == ranks[1].error == 0 < ranks[2].error == ranks[3].error < 1e6
    texts = [path.read_text().rstrip().rstrip(",") + "]" for path in tmp_path.glob("rank-[23]-*")]
    raw = [event["ts"] for text in texts for event in json.loads(text) if event["ph"] == "X"]
    assert ranks[2].shift == pytest.approx(LEAD_SECONDS * 1e6, abs=ranks[2].error)
    first = min(event["ts"] for q in (2, 3) for event in ranks[q].events if event["ph"] == "X")
    assert min(raw) - ranks[2].shift == pytest.approx(first, abs=2)
    check_spans(ranks, ("wire", "wait") if front == "ddp" else BY_CODEC)
    check_phases(ranks)


def test_a_folder_that_cannot_be_written_is_one_notice(tmp_path):
    (tmp_path / "file").touch()
    ended = start(2, "nn", -1, tmp_path / "file" / "x").end(code=0)
    assert ended.stderr.count("the timeline cannot be written") == 2  # one a rank
    assert "training goes on" in ended.stderr
