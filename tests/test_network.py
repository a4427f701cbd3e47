"""Bytes that a step sends between hosts, counted at their interfaces."""

import os
import shutil
import subprocess

import network
import pytest


@pytest.fixture(scope="module")
def hosts():
    """Two, where root may make namespaces and limit links."""
    made = not os.geteuid() and shutil.which("ip") and shutil.which("tc")
    try:
        if made:
            with network.network(2):
                network.limit(2, "1gbit")
    except (subprocess.CalledProcessError, OSError):
        made = False
    if not made:
        pytest.skip("hosts with links need root, iproute2 and namespaces")
    return 2


@pytest.mark.long
def test_a_half_wire_sends_half_between_hosts(hosts):
    names = [network.BY_HAND, "all_reduce", "all_reduce, bf16"]
    rows = network.measured(hosts, names, ["1gbit"], 1)
    dense, mean, half = (next(x["bytes"] for x in rows if x["form"] == name) for name in names)
    assert mean == pytest.approx(dense, rel=0.01) and half == pytest.approx(dense / 2, rel=0.02)
    # The audit counts what the interface does.
    assert all(x["bytes"] == pytest.approx(x["audit"][0], rel=0.02) for x in rows)
