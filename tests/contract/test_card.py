"""How a card's memory is asked for; what the answers are, only a card shows (tests/gpu)."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from teamtr.engines import card
from teamtr.sweep import cells


@pytest.fixture
def no_settings(monkeypatch):
    for name in card.SETTINGS:
        monkeypatch.setenv(name, "")  # so that what is set in the test is undone
        monkeypatch.delenv(name)


@pytest.fixture
def shares(monkeypatch) -> list[tuple[float, int]]:
    """Of a machine with two cards."""
    taken: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: taken.append((share, index))
    )
    return taken


def test_ranges_grow_unless_the_environment_says_otherwise(no_settings, monkeypatch):
    card.use(torch.device("cpu"))
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    card.use(torch.device("cuda"))
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    card.use(torch.device("cuda"))
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_processes_beside_each_other_take_equal_parts(shares):
    card.take_share(1)
    assert shares == []
    card.take_share(4)
    assert shares == [(card.SHARED_OUT / 4, 0), (card.SHARED_OUT / 4, 1)]


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:0", 0)])
def test_the_share_is_asked_for_by_the_number_of_the_card(device: str, index: int, monkeypatch):
    def fraction(asked):
        assert type(asked) is int, "torch refuses a device without an index"
        return {0: 0.25, 1: 0.5}[asked]

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000))
    assert card.own_bytes(torch.device(device)) == {0: 250, 1: 500}[index]


def test_a_run_of_a_table_takes_its_part_before_anything_is_loaded(shares, tmp_path, monkeypatch):
    seen = []

    def train(*_):
        seen.extend(shares)
        return iter(())

    monkeypatch.setattr(cells, "train", train)
    assert cells._trained(cells.Cell("one", 0, tmp_path / "run", team_file=object()), sharing=3) is None
    assert seen == [(card.SHARED_OUT / 3, 0), (card.SHARED_OUT / 3, 1)]
