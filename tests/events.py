"""The numbers written for TensorBoard, as its page shows them. Needs tensorboardX."""

from collections import defaultdict
from pathlib import Path


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """By name and step. If a run resumes from a step, later steps of earlier runs are not shown."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: dict[str, dict[int, float]] = defaultdict(dict)
    for path in sorted(folder.glob("events.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):  # length, its checksum, the event, its checksum
            size = int.from_bytes(content[at : at + 8], "little")
            event = Event.FromString(content[at + 12 : at + 12 + size])
            at += size + 16
            if event.session_log.status == SessionLog.START:
                for name, numbers in shown.items():
                    shown[name] = {step: number for step, number in numbers.items() if step < event.step}
            for value in event.summary.value:
                assert event.step not in shown[value.tag], f"{value.tag} of step {event.step} stands there twice"
                shown[value.tag][event.step] = value.simple_value
    return shown
