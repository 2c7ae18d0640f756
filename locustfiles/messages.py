"""The messages between the master and its workers, by Locust's own channel.

Each has one direction, one name and one shape, so that a local run (where
both sides live in one process) and a distributed one are the same code.
"""

from __future__ import annotations

# master to workers
STAGE = "bench_stage"  # run_id, plan, stage, stripe, stripes, settings, t0_s, clock_id, loop, run
BEAT = "bench_beat"  # run_id, stage, lost, heard_s: twice a second; a worker that was not heard sends nothing more
TAKE = "bench_take"  # run_id, stage, number, arrivals: of a lost worker, sorted int32, compressed
ACK = "bench_ack"  # run_id, stage, stripe, seq: the master has all batches up to seq
GO = "bench_go"  # run_id, stage, start_s, heard_s
HALT = "bench_halt"  # run_id, stage, abort, code
FLUSH = "bench_flush"  # run_id, whole: the master has every row
PONG = "bench_pong"  # sent_s, master_s

# workers to master
READY = "bench_ready"  # run_id, stage, stripe, planned, hash, error, prompts, offset_s, bound_s, shared
ROWS = "bench_rows"  # run_id, stage, stripe, seq, rows, data
DONE = "bench_done"  # run_id, stage, stripe, batches, rows, fault
GAUGE = "bench_gauge"  # run_id, stripe, samples, takes: also the sign of life, twice a second
FLUSHED = "bench_flushed"  # run_id
PING = "bench_ping"  # sent_s, clock_id
