"""The user of the process at the other end of a Unix socket.

Connections within one host carry no TLS. Instead the kernel reports the peer's user: a Unix socket
of another user's process is closed, whatever that process knows.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

_LINUX = struct.Struct("3i")  # pid, uid, gid
_XUCRED = struct.Struct("Ii")  # version, uid; more follows
_SOL_LOCAL, _LOCAL_PEERCRED = 0, 1


def check_user(sock: socket.socket) -> None:
    """Check that the peer is a process of this user.

    Raises:
        PermissionError: it is not; says whose.
    """
    uid = _user(sock)
    if uid != os.geteuid():
        raise PermissionError(
            f"at the other end of the Unix socket is a process of another user (uid {uid})"
        )


def _user(sock: socket.socket) -> int:
    if sys.platform == "linux":
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _LINUX.size)
        return int(_LINUX.unpack(data)[1])
    data = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 128)
    return int(_XUCRED.unpack_from(data)[1])
