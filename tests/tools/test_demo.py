"""`gradwire demo`: its data, its model, and a short run of the whole."""

import re
from pathlib import Path

import pytest
import torch

from gradwire.tools.demo.command import main
from gradwire.tools.demo.data import batches, load
from gradwire.tools.demo.model import Network, here
from gradwire.tools.demo.train import BATCH


def test_the_digits_are_all_there() -> None:
    train, test = load()
    assert len(train.digits) + len(test.digits) == 1797
    assert train.pictures.shape == (1497, 1, 8, 8)
    assert train.pictures.min() == 0
    assert train.pictures.max() == 1
    counts = torch.bincount(torch.cat([train.digits, test.digits]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_an_epoch_has_every_sample_once_in_its_own_order() -> None:
    train, _ = load()
    first = torch.cat([batch.pictures for batch in batches(train, BATCH, 1)])
    again = torch.cat([batch.pictures for batch in batches(train, BATCH, 1)])
    second = torch.cat([batch.pictures for batch in batches(train, BATCH, 2)])
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.allclose(first.sum(), train.pictures.sum())


def test_the_network_is_the_same_each_time() -> None:
    one, other = Network(here).state_dict(), Network(here).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.timeout(180)  # the first optimizer in each process loads a part of torch
def test_a_short_run_agrees_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["--epochs", "1", "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    found = re.search(r"largest difference of a step's loss: (\S+), below 1e-05", out)
    assert found, out
    assert float(found[1]) < 1e-12, "all is in double precision"
    for name in ("demo-loss.png", "demo-graph.png"):
        assert str(tmp_path / name) in out
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    lines = [line.split() for line in out.splitlines()]
    traffic = [line for line in lines if line and line[0] in ("worker0", "worker3")]
    assert all(float(line[4].replace(",", "")) > 1 for line in traffic), "MB sent"
    assert len(traffic) == 2


def test_epochs_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--epochs", "0"])
    assert "--epochs 0: must be at least 1" in capsys.readouterr().err
