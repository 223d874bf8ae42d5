"""The stores that the drop-in opens: as private as Gradwire's own."""

from pathlib import Path
from textwrap import dedent

import pytest

from tests.compat.running import run
from tests.worlds import free_port

pytestmark = pytest.mark.slow

JOIN = """
import os, sys
import psutil
import torch.distributed as dist
import torch.distributed.rpc as rpc

def join(url):
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)

url = sys.argv[1]
"""


def test_a_tcp_store_listens_on_the_address_asked_for(tmp_path: Path) -> None:
    code = """
    join(url)
    port = int(url.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    print(*{c.laddr.ip for c in found if c.laddr.port == port and c.status == "LISTEN"})
    rpc.shutdown()
    """
    done = run(JOIN + dedent(code), tmp_path, f"tcp://127.0.0.1:{free_port()}")
    assert done.stdout.strip() == "127.0.0.1", done.stderr


def test_a_tcp_store_can_be_that_of_a_process_group(tmp_path: Path) -> None:
    code = """
    dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    join(url)
    print(rpc.rpc_sync("worker", max, (1, 2)))
    rpc.shutdown()
    dist.destroy_process_group()
    """
    done = run(JOIN + dedent(code), tmp_path, f"tcp://127.0.0.1:{free_port()}")
    assert done.stdout.strip() == "2", done.stderr


def test_the_file_of_a_store_is_for_its_user_alone(tmp_path: Path) -> None:
    code = """
    join(url)
    print(oct(os.stat(url.removeprefix("file://")).st_mode & 0o777))
    rpc.shutdown()
    """
    done = run(JOIN + dedent(code), tmp_path, f"file://{tmp_path}/meet")
    assert done.stdout.strip() == "0o600", done.stderr


def test_a_tcp_store_outlives_a_world_and_serves_the_next_one(tmp_path: Path) -> None:
    """Rank 0 may be the first to leave, and others still use the store that it hosts."""
    code = """
    for _ in range(2):
        join(url)
        print(rpc.rpc_sync("worker", max, (1, 2)))
        rpc.shutdown()
    dist.TCPStore("127.0.0.1", int(url.rpartition(":")[2]), is_master=False).set("a", "b")
    """
    done = run(JOIN + dedent(code), tmp_path, f"tcp://127.0.0.1:{free_port()}")
    assert done.stdout.split() == ["2", "2"], done.stderr
    assert done.returncode == 0, done.stderr
