"""Settings of the environment."""

import pytest

from distopt.errors import UsageError
from distopt.launch.rendezvous.member import ports
from distopt.settings import Settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24000-24099", range(24000, 24100)), ("1-65535", range(1, 65536)), ("7-7", range(7, 8)), ("", None)],
)
def test_a_range_of_ports(text, expected):
    assert Settings.from_env({"DISTOPT_PORTS": text}).ports == expected


@pytest.mark.parametrize(
    "text", ["24000", "24099-24000", "0-9", "1-65536", "a-b", "1-2-3", "-1-5", "1 - 2", "1-", "1_0-20"]
)
def test_a_range_of_ports_that_is_none(text):
    with pytest.raises(UsageError, match=r"DISTOPT_PORTS=.* is not a range of TCP ports, such as 24000-24099"):
        Settings.from_env({"DISTOPT_PORTS": text})


@pytest.mark.parametrize("count", [1, 3, 8, 9, 1000])
def test_the_server_listens_in_the_range(monkeypatch, count):
    monkeypatch.setenv("DISTOPT_PORTS", f"24000-{23999 + count}")
    tried = [ports(bytes([i]) * 32) for i in range(50)]
    assert {port for one in tried for port in one} <= set(range(24000, 24000 + count))
    assert all(len(set(one)) == len(one) >= min(count, 2) for one in tried)
    assert count > 8 or all(len(one) == count for one in tried)  # all of a small range
