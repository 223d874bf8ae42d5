"""The keys of a world, and what they seal.

A world's secret comes, in this order, from the user (`Options.key`, then `key_file`); with
`trust_store`, from the store, into which whoever comes first puts a random one; else from a file
of this user on this machine (`key_files.own`). So no secret goes by the store unless the user says
that nobody else reads it, and what one user runs on one machine needs no setting, however it was
started.

The key is made of the secret and a salt, which is public and new for each world. So a worker of
one world is a stranger in another, also where both have the same secret.

What is read from the store is not trusted. A card counts only with the seal of one who knows the
key: an address that was changed would lead to somebody else.

Pure: no I/O.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from ..errors import AuthenticationError

_SIZE = 64  # of a seal, in hexadecimal


def derive(secret: bytes, salt: bytes) -> bytes:
    """The key of the world with this salt."""
    return hmac.digest(secret, b"gradwire world\0" + salt, "sha256")


Keys = Callable[[], tuple[bytes, ...]]
"""The keys of a world that count now. The first is used; all are accepted, so that one can take
another's place while workers run."""


def id_of(key: bytes) -> int:
    """The id of a key in a hello."""
    return int.from_bytes(hmac.digest(key, b"gradwire key", "sha256")[:4], "little")


def named(keys: tuple[bytes, ...], key_id: int) -> bytes:
    """The key with this id; the current one if there is none."""
    return next((key for key in keys if id_of(key) == key_id), keys[0])


def digest(key: bytes) -> bytes:
    """Distinguishes keys without revealing them."""
    return hmac.digest(key, b"gradwire rendezvous", "sha256").hex().encode()


def seal(key: bytes, data: bytes) -> bytes:
    """Authenticate a card for the store."""
    return _mac(key, data) + data


def unseal(keys: tuple[bytes, ...], sealed: bytes) -> bytes:
    """The card, if it was authenticated with one of the keys.

    Raises:
        AuthenticationError: it was not.
    """
    data = sealed[_SIZE:]
    if not any(hmac.compare_digest(sealed[:_SIZE], _mac(key, data)) for key in keys):
        raise AuthenticationError("not authenticated with this world's key")
    return data


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, b"card\0" + data, "sha256").hex().encode()
