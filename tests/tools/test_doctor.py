"""`gradwire doctor`: what it finds, and its self test."""

from pathlib import Path
from typing import Any

import pytest

from gradwire import Options
from gradwire._transport import addresses, shared_memory
from gradwire.tools.doctor import checks, selftest
from gradwire.tools.doctor.command import main


def told(options: Options) -> dict[str, tuple[str, str]]:
    return {f.what: (f.found, f.so) for f in checks.transports(options)}


def test_everything_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 0
    out = capsys.readouterr().out
    for what in ("torch", "Unix sockets", "shared memory", "TCP", "GPU", "open files"):
        assert f"\n   {what}" in out
    assert out.endswith("no problems found\n")


def test_it_tells_why_something_is_not_used() -> None:
    found = told(Options(unix_sockets=False))
    assert found["Unix sockets"] == ("yes", "not used: GRADWIRE_UNIX_SOCKETS is 0")
    assert "between all workers" in found["TCP"][1]


def test_it_tells_what_the_system_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("not here")

    monkeypatch.setattr(addresses, "listen_unix", refuse)
    monkeypatch.setattr(shared_memory, "is_available", lambda: False)
    found = told(Options())
    assert found["Unix sockets"][0] == found["shared memory"][0] == "no"


def test_an_address_of_another_machine_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADWIRE_BIND", "192.0.2.1")
    assert main(["--quick"]) == 1
    out = capsys.readouterr().out
    assert " ! TCP" in out
    assert "1 problems, marked with !" in out


def test_variables_that_make_no_sense_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADWIRE_THREADS", "many")
    assert main(["--quick"]) == 1
    assert "GRADWIRE_THREADS='many'" in capsys.readouterr().out


def test_the_key_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADWIRE_KEY", "do not show this to anyone")
    main(["--quick"])
    assert "do not show" not in capsys.readouterr().out


def exposed(**options: Any) -> dict[str, checks.Finding]:
    return {f.what: f for f in checks.exposure(Options(**options))}


def test_by_default_nothing_is_exposed() -> None:
    found = exposed()
    assert not any(f.is_bad for f in found.values())
    assert found["key"].found == "this user's own"
    assert found["listens on"].found == "127.0.0.1"
    assert found["TLS between machines"].found == "yes"
    assert found["limits for one worker"].found.startswith("65,536 requests, ")
    limited = exposed(max_peer_requests=50, max_peer_memory=3 << 29)
    assert limited["limits for one worker"].found == "50 requests, 1.5 GiB"


def test_what_is_exposed_is_marked(tmp_path: Path) -> None:
    found = exposed(trust_store=True, tls=False, bind="0.0.0.0")
    assert found["key"].is_bad
    assert found["TLS between machines"].is_bad
    assert "others can reach it" in found["listens on"].so
    readable = tmp_path / "key"
    readable.write_text("a key that all can read\n")
    readable.chmod(0o644)
    (key,) = (f for f in exposed(key_file=str(readable)).values() if f.what == "key")
    assert key.is_bad
    assert "can be read by others" in key.so


@pytest.mark.slow
def test_the_self_test_measures_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_SLICE", 0.05)
    found = {f.what: f for f in selftest.self_test(unix_sockets=False)}
    assert found["transport"].found == "TCP"
    assert found["gradients"].found == "equal those of local autograd"
    assert found["sending 64 MiB"].found.endswith(" GB/s")
    assert not any(f.is_bad for f in found.values())


@pytest.mark.slow
def test_a_partner_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "JOIN", 0.5)
    monkeypatch.setattr(selftest.sys, "executable", "/bin/false")
    *_, last = selftest.self_test(unix_sockets=True)
    assert last.is_bad
    assert "ranks [1] of 2 did not arrive" in last.so
