"""The table of `tests.faults.healing` says what the job has stated, and the memory is that of its agents."""

import os
from types import SimpleNamespace

from tests.faults import healing
from tests.faults.held import held_by

LOST = "distopt run: node 1 has ended; healed: step {} was done after {} s (step 9 had been reached, {}: {} lost)"


def test_each_healing_is_counted_with_its_kind(monkeypatch):
    job = SimpleNamespace(lines=["step 8", "step 9"], agents=[])
    said = iter(
        [
            [LOST.format(9, 0.5, "goes on", "1 step"), "step 9", LOST.format(10, 2.0, "node has come; ", "0 steps")],
            [LOST.format(9, 1.5, "goes on", "3 steps")],
        ]
    )
    monkeypatch.setattr(healing, "disturb", lambda job, *_: job.lines.extend(next(said)) or 0.0)
    record = healing.Record(job)
    record.disturb([], "cut", None)
    record.disturb([], "cut", None)
    assert record.most_lost == 3
    found = list(record.lines())
    assert "| cut | 2 | 1.00 s, 1.50 s | 0 | 1 | 1 |" in found
    assert "| cut, return | 1 | 2.00 s, 2.00 s | 1 | 0 | 0 |" in found
    assert "4 steps lost, 1 printed more than once" in found


def test_memory_files_of_an_agent_are_counted():
    before = held_by([os.getpid()])
    fd = os.memfd_create("distopt states")
    try:
        os.write(fd, bytes(3 << 20))
        found = held_by([os.getpid()])
    finally:
        os.close(fd)
    assert found.files - before.files == 3 << 20
    assert found.agent > 1 << 20
