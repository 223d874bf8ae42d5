"""The certificates that a world issues itself.

Whoever knows the world's key has the private key of its authority. So a certificate of it proves no
more than the key does, but to each other before anything else is said; and what two workers say
then, a third one cannot read. Needs `cryptography`: the standard library makes no certificates.
"""

from __future__ import annotations

import hmac
from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from .keys import id_of

_VALID = timedelta(days=1)
_SKEW = timedelta(hours=1)  # allowed clock skew


def issue(world_key: bytes, name: str) -> tuple[str, bytes]:
    """The world's authority, and a new certificate of it with its private key, as PEM."""
    seed = hmac.digest(world_key, b"gradwire certificate authority", "sha256")
    authority = Ed25519PrivateKey.from_private_bytes(seed)
    own = Ed25519PrivateKey.generate()
    # By its name OpenSSL finds it, where there are several.
    common_name = f"the authority of a world, {id_of(world_key):08x}"
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    root = _certificate(issuer, issuer, authority.public_key(), is_authority=True)
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    leaf = _certificate(x509.Name([]), issuer, own.public_key(), is_authority=False)
    leaf = leaf.add_extension(names, critical=True)
    pem = leaf.sign(authority, None).public_bytes(Encoding.PEM)
    private = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return root.sign(authority, None).public_bytes(Encoding.PEM).decode(), pem + private


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: Ed25519PublicKey,
    *,
    is_authority: bool,
) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    length = 0 if is_authority else None
    kind = x509.BasicConstraints(ca=is_authority, path_length=length)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(kind, critical=True)
    )
