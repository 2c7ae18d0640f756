"""Batches reach the master once and in order, whatever is lost; memory stays small."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.commands.recovery_sources import read_sources
from bench.records.outbox import Outbox
from bench.records.shard import ShardWriter, read_shard


def test_no_more_than_the_window_is_on_its_way() -> None:
    box = Outbox(window=3)
    for i in range(5):
        box.add(b"%d" % i)
    assert [seq for seq, _ in box.due(0.0)] == [1, 2, 3] and box.due(0.1) == []
    box.ack(2)
    assert box.due(0.2) == [(4, b"3"), (5, b"4")]
    box.ack(1)  # an old acknowledgement changes nothing
    box.ack(99)  # nor one that cannot be
    assert box.acked == 2 and not box.idle
    box.ack(5)
    assert box.idle and box.held_bytes == 0


def test_what_is_not_acknowledged_is_sent_again() -> None:
    box = Outbox(window=4, resend_s=2.0)
    for _ in range(3):
        box.add(b"x")
    assert len(box.due(0.0)) == 3 and box.due(1.9) == []
    box.ack(1, 1.9)
    assert box.due(3.8) == []  # two seconds from the last sign of life, not from the send
    assert [seq for seq, _ in box.due(3.9)] == [2, 3] and box.resent == 2


def test_memory_holds_the_window_and_the_disk_the_rest(tmp_path: Path) -> None:
    shard = ShardWriter(tmp_path / "w.shard", {})
    box = Outbox(
        keep=lambda seq, data: shard.rows(stage=0, stripe=0, seq=seq, data=data), read=shard.read, window=4, resend_s=1.0
    )
    data = [bytes([i]) * 1000 for i in range(200)]
    got: list[bytes] = []
    for i, piece in enumerate(data):  # the master answers nothing: back-pressure
        box.add(piece)
        got += [d for _, d in box.due(i / 1000)]
        assert box.held_bytes <= 4 * 1000
    assert len(got) == 4
    while not box.idle:
        box.ack(len(got), 0.2)
        got += [d for _, d in box.due(0.2)]
    assert got == data


@pytest.mark.parametrize("seed", range(5))
def test_a_channel_that_loses_doubles_and_reorders_delivers_each_batch_once(seed: int) -> None:
    rng = random.Random(seed)
    box, taken = Outbox(window=5, resend_s=1.0), []
    for i in range(60):
        box.add(b"%d" % i)
    now, way = 0.0, []
    for _ in range(5000):
        if box.idle:
            break
        now += 0.3
        way += [m for m in box.due(now) for _ in range(rng.choice([0, 1, 1, 2]))]
        rng.shuffle(way)
        for seq, data in way[: rng.randint(0, 4)]:  # the collector's rule: in order only, answer with the last one held
            if seq == len(taken) + 1:
                taken.append(data)
            if rng.random() < 0.7:
                box.ack(len(taken), now)
        way = way[4:]
    assert box.idle and taken == [b"%d" % i for i in range(60)]


def test_a_shard_without_a_run_in_its_head_is_refused_in_words(tmp_path: Path) -> None:
    """Whole frames and a checksum, and yet of nothing that can be put together."""
    ShardWriter(tmp_path / "old.shard", {"made_by": "another"}).close()
    with pytest.raises(ValueError, match=r"old\.shard: names no run and no plan in its head"):
        read_sources([tmp_path / "old.shard"])
    ShardWriter(tmp_path / "part.shard", {"run": {"run_id": "r"}, "plan": "{}"}).close()
    with pytest.raises(ValueError, match=r"part\.shard: its head has not all of a run .*finished_utc"):
        read_sources([tmp_path / "part.shard"])
    assert read_sources([tmp_path])[0] == [] and len(read_sources([tmp_path])[1]) == 2
    assert "old.shard: names no run" in read_sources([tmp_path])[1][0]


def test_a_torn_shard_gives_all_its_whole_frames(tmp_path: Path) -> None:
    path = tmp_path / "w.shard"
    shard = ShardWriter(path, {"run": {"run_id": "x"}, "plan": "{}"})
    shard.stage({"stage": 0, "stripe": 1, "stripes": 2, "start_s": 1.5})
    for seq in (1, 2, 3):
        shard.rows(stage=0, stripe=1, seq=seq, data=b"batch %d" % seq)
    shard.close()
    whole = path.read_bytes()
    for cut in (1, 7, 20):  # inside the last batch, its frame, its frame and the one before
        path.write_bytes(whole[:-cut])
        found = read_shard(path)
        assert found.head["run"]["run_id"] == "x" and found.stages[0]["start_s"] == 1.5
        assert [seq for _, _, seq, _ in found.batches] == [1, 2] and found.torn_bytes > 0
    path.write_bytes(whole[:10])
    with pytest.raises(ValueError, match="is no shard"):
        read_shard(path)
