"""The engine as a process: ready line, exits, parents, ports, and a step clock that keeps its promise."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from bench.commands.engine_process import EngineStartError, start_engine


def write_config(folder, config) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def config_path(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("process"), {
        "model": "test-model", "base_url": "http://127.0.0.1:1/v1",
        "scheduler": {"policy": "fcfs", "max_num_seqs": 32, "batch_size_cap": 32},
        "loadgen": {"input_len_range": [10, 100], "max_output_tokens": 1000},
        "engine": {"embedded": True, "time_scale": 0.125, "max_model_len": 2048}})


def wait_gone(pid: int, limit_s: float = 5.0) -> bool:
    """True when the process is gone (or a zombie that nobody has reaped)."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        try:
            with open(f"/proc/{pid}/stat") as stream:
                if stream.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly_with_streams_open(config_path, client_class, tmp_path, number):
    engine = start_engine(config_path, log_path=tmp_path / "log")
    client = client_class(engine.base_url)
    wire = client.wire()
    wire.send("POST", "/v1/chat/completions", client.chat_body(5, 1500))
    client.wait_for(lambda s: s["counters"]["generated_tokens"] > 3)
    os.kill(engine.pid, number)
    answer = wire.read()
    assert answer.status == 200 and not answer.complete
    assert engine.stop() == 0
    assert (tmp_path / "log").read_text() == ""


def test_two_engines_at_once_on_port_zero(config_path, client_class):
    with start_engine(config_path) as first, start_engine(config_path) as second:
        assert first.base_url != second.base_url and first.base_url.startswith("http://127.0.0.1:")
        for engine in (first, second):
            client = client_class(engine.base_url)
            assert client.chat(5, 5).done
            assert client.replica()["counters"]["finished"] == 1
    assert first.poll() == 0 and second.poll() == 0


def test_restart_on_the_same_port(config_path, client_class):
    engine = start_engine(config_path)
    port = int(engine.base_url.rpartition(":")[2])
    client = client_class(engine.base_url)
    wire = client.wire()
    wire.send("POST", "/v1/chat/completions", client.chat_body(5, 1500))
    client.wait_for(lambda s: s["running"] == 1)
    os.kill(engine.pid, signal.SIGKILL)
    assert not wire.read().complete
    engine.stop()
    with pytest.raises(ConnectionRefusedError):
        client.chat()
    with start_engine(config_path, port=port) as again:
        assert again.base_url == engine.base_url and client.chat(5, 5).done
        assert client.replica()["counters"]["submitted"] == 1  # nothing is remembered


def test_it_ends_when_its_parent_dies(config_path, tmp_path):
    script = ("import sys, time\nfrom bench.commands.engine_process import start_engine\n"
              "engine = start_engine(sys.argv[1])\nprint(engine.pid, flush=True)\ntime.sleep(60)\n")
    parent = subprocess.Popen([sys.executable, "-c", script, config_path], stdout=subprocess.PIPE)
    engine_pid = int(parent.stdout.readline())
    parent.kill()
    assert wait_gone(engine_pid)
    parent.wait()
    parent.stdout.close()


def test_a_parent_that_is_gone_already(config_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = subprocess.run([sys.executable, "-m", "engine.serve", "--config", config_path, "--parent-pid",
                           str(gone.pid)], capture_output=True, timeout=20)
    assert done.returncode == 0


def test_port_in_use_is_exit_3(config_path, tmp_path):
    with start_engine(config_path) as engine:
        port = int(engine.base_url.rpartition(":")[2])
        with pytest.raises(EngineStartError) as caught:
            start_engine(config_path, port=port, log_path=tmp_path / "log")
    assert caught.value.exit_code == 3 and str(port) in str(caught.value)


@pytest.mark.parametrize("content", ["{", '{"engin": {}}', '{"engine": {"time_scale": 0}}'])
def test_bad_config_is_exit_2_without_a_traceback(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(EngineStartError) as caught:
        start_engine(path, log_path=tmp_path / "log")
    assert caught.value.exit_code == 2
    assert "Traceback" not in (tmp_path / "log").read_text() and "bad.json" in (tmp_path / "log").read_text()


def test_missing_key_file_is_exit_2(config_path, tmp_path):
    with pytest.raises(EngineStartError) as caught:
        start_engine(config_path, api_key_file=tmp_path / "none", log_path=tmp_path / "log")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("option", "start"), [([], b"READY http://127.0.0.1:"), (["--json"], b'{"ready": "http://127.0.0.1:')])
def test_serve_engine_command(config_path, option, start):
    command = [sys.executable, "-m", "bench", "serve-engine", "--config", config_path, "--port", "0", *option]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = process.stdout.readline()
    assert line.startswith(start) and (not option or list(json.loads(line)) == ["ready"])
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0 and process.stderr.read() == b""
    process.stdout.close()
    process.stderr.close()
