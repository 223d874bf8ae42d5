"""What is there on this machine, what of it is used, and why. Looks only; starts nothing."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

import torch

from ... import __version__
from ..._transport import addresses, key_files, quota, shared_memory
from ...errors import GradwireError
from ...options import Options

_FEW_FILES = 1024
_PER_WORKER = 8  # descriptors of a busy link, approximately
_VARIABLE = "GRADWIRE_"
_SECRETS = ("GRADWIRE_KEY",)


class Finding(NamedTuple):
    """One line: what was looked at, what was found, and what follows from it."""

    what: str
    found: str
    so: str = ""
    is_bad: bool = False
    """Something that the user should look at."""


def versions() -> Iterator[Finding]:
    yield Finding("gradwire", __version__)
    yield Finding("Python", platform.python_version(), platform.python_implementation())
    yield Finding("torch", str(torch.__version__))
    yield Finding("system", f"{platform.system()} {platform.release()}")
    yield Finding(
        "cores",
        str(len(os.sched_getaffinity(0)) if _has_affinity() else os.cpu_count()),
        "for this process",
    )


def transports(options: Options) -> Iterator[Finding]:
    """How workers would talk, with these options."""
    unix = _unix_sockets()
    memory = shared_memory.is_available()
    uses_unix = unix and options.unix_sockets
    yield _way(
        "Unix sockets", unix, options.unix_sockets, "between workers of one host"
    )
    if memory and options.shared_memory and not uses_unix:
        yield Finding("shared memory", "yes", "not used: requires Unix sockets")
    else:
        yield _way(
            "shared memory",
            memory,
            options.shared_memory,
            "for tensors above 32 KiB, between workers of one host",
        )
    yield _tcp(options, uses_unix)


def exposure(options: Options) -> Iterator[Finding]:
    """What a world here would be open to, with these options."""
    yield _key(options)
    bound = options.bind or "127.0.0.1"
    try:
        is_open = not addresses.is_loopback((bound, 0))
    except ValueError:  # a name
        is_open = True
    yield Finding(
        "listens on",
        bound,
        "others can reach it, but need the key"
        if is_open
        else "this machine only, unless the rendezvous is on another one",
    )
    yield _tls(options)
    most = options.max_peer_memory or quota.default_memory()
    yield Finding(
        "limits for one worker",
        f"{options.max_peer_requests:,} requests, {most / 2**30:.1f} GiB",
        "in flight (GRADWIRE_MAX_PEER_REQUESTS, GRADWIRE_MAX_PEER_MEMORY)",
    )
    if options.allow is None:
        yield Finding(
            "holders of the key", "can run any code", "unless allow=[...] is given"
        )
    yield Finding("audit log", options.audit or "none", "set GRADWIRE_AUDIT to a file")


def _key(options: Options) -> Finding:
    try:
        given = key_files.given(options)
        if not given and not options.trust_store:
            key_files.own()
    except (OSError, ValueError, TypeError, GradwireError) as error:
        return Finding("key", "unusable", str(error), is_bad=True)
    if given:
        return Finding("key", "yours", "for all machines that have it")
    if options.trust_store:
        so = "its readers can run any code (GRADWIRE_TRUST_STORE)"
        return Finding("key", "in the store", so, is_bad=True)
    return Finding("key", "this user's own", "for workers of this machine")


def _tls(options: Options) -> Finding:
    if options.tls is False:
        so = "a man in the middle can run any code (GRADWIRE_TLS)"
        return Finding("TLS between machines", "off", so, is_bad=True)
    if options.tls_cert:
        return Finding("TLS between machines", "yes", "with your own certificates")
    if find_spec("cryptography") is None:
        so = "connections to other machines fail: pip install 'gradwire[tls]'"
        return Finding("TLS between machines", "not possible", so)
    return Finding("TLS between machines", "yes", "with the world's own certificates")


def devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "this torch is built without CUDA" if built is None else "no driver"
        yield Finding("GPUs", "none", why)
        return
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        yield Finding(f"GPU {number}", f"{found.name}, {memory}")


def limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft <= _FEW_FILES
    advice = f"enough for about {soft // _PER_WORKER} busy workers"
    if few and hard != soft:
        advice += f"; raise it to {_number(hard)} with: ulimit -n {hard}"
    yield Finding("open files", _number(soft), advice if few else "plenty")
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    yield Finding("processes and threads", _number(soft))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    yield Finding("memory of a process", _number(soft))


def settings() -> Iterator[Finding]:
    """What the environment changes."""
    given = {n: v for n, v in sorted(os.environ.items()) if n.startswith(_VARIABLE)}
    for name, value in given.items():
        yield Finding(name, "set" if name in _SECRETS else value)
    if not given:
        yield Finding(
            f"{_VARIABLE}*", "not set", "all options have their default values"
        )


def _way(what: str, is_there: bool, is_wanted: bool, use: str) -> Finding:
    if not is_there:
        return Finding(what, "no", "not supported or not permitted on this system")
    name = what.upper().replace(" ", "_")
    return Finding(
        what, "yes", use if is_wanted else f"not used: {_VARIABLE}{name} is 0"
    )


def _unix_sockets() -> bool:
    try:
        listener, path = addresses.listen_unix()
    except OSError:
        return False
    listener.close()
    addresses.forget_unix(path)
    return True


def _tcp(options: Options, uses_unix: bool) -> Finding:
    use = "between hosts" if uses_unix else "between all workers"
    try:
        where = addresses.bind_address(options, None)
        with addresses.listen_tcp(where, options.ports) as listener:
            address = listener.getsockname()[0]
    except (OSError, GradwireError) as error:
        return Finding("TCP", "no", str(error), is_bad=True)
    if where == "127.0.0.1" and options.bind is None:
        use += "; on loopback here, otherwise on the rendezvous interface"
    return Finding("TCP", f"yes, {address} on {socket.gethostname()}", use)


def _has_affinity() -> bool:
    return hasattr(os, "sched_getaffinity")


def _number(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,}"
