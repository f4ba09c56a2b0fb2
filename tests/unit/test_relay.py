"""The path of the output of a rank under `distopt run`."""

import contextlib
import fcntl
import os
import selectors

import pytest

from distopt.launch.supervise.output import Output, Relay


@pytest.fixture
def shown():
    """Where lines are shown, and a function that returns what has been shown."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
    selector = selectors.DefaultSelector()
    output = Output(write, selector, lambda text: os.write(2, f"{text}\n".encode()))

    def seen():
        with contextlib.suppress(BlockingIOError):
            return os.read(read, 1 << 20)
        return b""

    yield output, seen
    output.close()
    selector.close()
    os.close(read)
    os.close(write)


def test_whole_lines_with_marks_and_a_copy_without(shown, tmp_path):
    target, seen = shown
    relay = Relay(target, b"[rank 7] ", (tmp_path / "log").open("wb", buffering=0))
    for written, expected in [
        (b"one\ntw", b"[rank 7] one\n"),
        (b"o\n\nthree", b"[rank 7] two\n[rank 7] \n"),
        (b"\r 5%\r", b"[rank 7] three\r[rank 7]  5%\r"),
        (b"end", b""),
    ]:
        os.write(relay.sink, written)
        assert relay.pass_on()
        assert seen() == expected
    with pytest.raises(BlockingIOError):
        relay.pass_on()
    os.close(relay.sink)
    assert not relay.pass_on()
    relay.finish()
    relay.finish()
    assert seen() == b"[rank 7] end\n"
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n\nthree\r 5%\rend\n"


def test_a_prompt_is_shown_at_once_and_ended_by_lines_of_others(shown, tmp_path):
    target, seen = shown
    asks, other = (
        Relay(target, copy=(tmp_path / "log").open("wb", buffering=0), prompts=True),
        Relay(target, b"[rank 1] "),
    )
    for relay, written, expected in [
        (asks, b"one\nname", b"one\nname"),
        (asks, b"? ", b"? "),
        (other, b"half a", b""),
        (asks, b"hello\n", b"hello\n"),
        (other, b" line\n", b"[rank 1] half a line\n"),
        (asks, b"(Pdb) ", b"(Pdb) "),
        (other, b"two\n", b"\n[rank 1] two\n"),
        (asks, b"41\n(Pdb) ", b"41\n(Pdb) "),
    ]:
        os.write(relay.sink, written)
        relay.pass_on()
        assert seen() == expected
    for relay in (asks, other):
        os.close(relay.sink)
        relay.finish()
    assert seen() == b"\n"
    assert (tmp_path / "log").read_bytes() == b"one\nname? hello\n(Pdb) 41\n(Pdb) \n"


def test_a_line_without_end_is_shown_before_it_fills_memory(shown):
    target, seen = shown
    relay = Relay(target)
    for _ in range(3):
        os.write(relay.sink, b"x" * 30_000)
        relay.pass_on()
    assert seen() == b"x" * 90_000
    os.close(relay.sink)
    relay.finish()


def test_the_exception_of_the_last_traceback_is_known(shown):
    target, _ = shown
    relay = Relay(target)
    os.write(relay.sink, b"Traceback (most recent call last):\n  File 1\nKeyError: 'a'\nDuring\n\n")
    os.write(relay.sink, b"Traceback (most recent call last):\n  File 2\n    f()\nValueError: b\nlast words\n")
    os.close(relay.sink)
    relay.finish()
    assert relay.error == "ValueError: b"


def test_a_full_disk_costs_the_copy_only(shown, capfd):
    target, seen = shown
    relay = Relay(target, b"", open("/dev/full", "wb", buffering=0))  # noqa: PTH123, SIM115
    for line in (b"one\n", b"two\n"):
        os.write(relay.sink, line)
        relay.pass_on()
    os.close(relay.sink)
    relay.finish()
    assert seen() == b"one\ntwo\n"
    assert capfd.readouterr().err == ("cannot write /dev/full (No space left on device); what follows is shown only\n")
