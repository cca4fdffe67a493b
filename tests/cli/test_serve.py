"""`broadsheet serve` as a process: its start, its log, its end, and what survives."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

SPEC = b"""\
name: ex/aaaa
replication: 1
fragment:
  length: 131072
  compression_codec: NONE
  refresh_interval: 1m0s
"""


def apply(run: Any, broker: Any) -> None:
    done = run("journals", "apply", "--broker.address", broker.address, input=SPEC)
    assert done.status == 0, done.err


def test_start_and_drain(start_broker: Any, run: Any, tmp_path: Path) -> None:
    broker = start_broker("--data", str(tmp_path / "data"))
    configuration = broker.until("broker configuration")
    assert configuration["data"] == str(tmp_path / "data")
    assert (configuration["durability"], configuration["level"]) == ("fsync", "info")
    started = broker.until("starting broker")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", started["endpoint"])
    assert started["zone"] == "local"
    assert httpx.get(f"{broker.address}/debug/ready").status_code == 200
    apply(run, broker)
    reply = httpx.put(f"{broker.address}/ex/aaaa", content=b"hello")
    assert reply.headers["Location"] == f"{broker.address}/ex/aaaa"
    assert f'suffix:"{started["id"]}"' in reply.headers["X-Route-Token"]
    broker.process.send_signal(signal.SIGTERM)
    assert broker.process.wait(20) == 0
    broker.until("goodbye")
    assert broker.until("caught signal")["signal"] == "terminated"
    again = start_broker("--data", str(tmp_path / "data"))
    assert again.until("starting broker")["id"] == started["id"]  # the identity is kept
    assert httpx.get(f"{again.address}/ex/aaaa").content == b"hello"


def test_drain_ends_blocked_reads_and_finishes_requests(start_broker: Any, run: Any, tmp_path: Path) -> None:
    broker = start_broker("--data", str(tmp_path / "data"))
    apply(run, broker)
    httpx.put(f"{broker.address}/ex/aaaa", content=b"hello")
    host, _, port = broker.address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), 20) as reader, socket.create_connection((host, int(port))) as idle:
        reader.sendall(b"GET /ex/aaaa?block=true HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while b"hello\r\n" not in received:
            received += reader.recv(1 << 16)
        begin = time.monotonic()
        broker.process.send_signal(signal.SIGINT)
        assert broker.process.wait(20) == 0
        assert time.monotonic() - begin < 8
        while part := reader.recv(1 << 16):
            received += part
        assert received.endswith(b"0\r\nX-Close-Error: broker terminated RPC\r\n\r\n")
        idle.settimeout(5)
        assert idle.recv(1) == b""


def test_second_signal_exits_at_once(start_broker: Any, run: Any, tmp_path: Path) -> None:
    broker = start_broker("--data", str(tmp_path / "data"))
    apply(run, broker)
    host, _, port = broker.address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as stalled:
        stalled.sendall(b"PUT /ex/aaaa HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\nx")
        # Keeps the append alive (its minimum rate), so that the drain waits for it.
        stalled.sendall(bytes(10_000_000))
        broker.process.send_signal(signal.SIGTERM)
        broker.until("caught signal")
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(5) != 0


def test_killed_broker_keeps_what_it_acknowledged(start_broker: Any, run: Any, tmp_path: Path) -> None:
    broker = start_broker("--data", str(tmp_path / "data"))
    apply(run, broker)
    for number in range(50):
        assert httpx.put(f"{broker.address}/ex/aaaa", content=b"%03d\n" % number).status_code == 204
    broker.process.kill()
    broker.process.wait()
    again = start_broker("--data", str(tmp_path / "data"))
    assert httpx.get(f"{again.address}/ex/aaaa").content == b"".join(b"%03d\n" % number for number in range(50))


def test_memory_leaves_nothing(start_broker: Any, run: Any, tmp_path: Path) -> None:
    broker = start_broker("--data", str(tmp_path / "data"), "--broker.durability", "memory")
    apply(run, broker)
    assert httpx.put(f"{broker.address}/ex/aaaa", content=b"hello").status_code == 204
    assert httpx.get(f"{broker.address}/ex/aaaa").content == b"hello"
    broker.process.terminate()
    assert broker.process.wait(20) == 0
    assert not (tmp_path / "data").exists()


def test_environment_and_default_folder(start_broker: Any, tmp_path: Path) -> None:
    broker = start_broker(env={"BROADSHEET_DATA": str(tmp_path / "here"), "BROKER_DURABILITY": "os"})
    assert broker.until("broker configuration")["durability"] == "os"
    assert (tmp_path / "here").is_dir()


def test_slow_appender_is_aborted(start_broker: Any, run: Any) -> None:
    broker = start_broker("--broker.durability", "memory", "--broker.min-append-rate", "1000000000")
    apply(run, broker)
    host, _, port = broker.address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), 20) as client:
        client.sendall(b"PUT /ex/aaaa HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nx")
        reply = client.recv(1 << 16)
    assert reply.startswith(b"HTTP/1.1 500 ")
    text = b"rpc error: code = Unknown desc = append stream: client stream didn't sustain the minimum append data rate"
    assert text in reply


# --- Starts that fail: one line that says what to do ---


def failed(run: Any, *flags: str) -> str:
    done = run("serve", *flags)
    assert done.status == 1
    assert "Traceback" not in done.err
    fatal = [line for line in done.err.splitlines() if "level=fatal" in line]
    assert len(fatal) == 1
    assert done.last_line == fatal[0]
    return str(fatal[0])


def test_port_in_use(run: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        line = failed(run, "--data", str(tmp_path / "data"), "--broker.port", port)
    assert f'msg="failed to listen" address="127.0.0.1:{port}" err="Address already in use"' in line
    assert "--broker.port" in line
    assert not (tmp_path / "data").exists()


def test_folder_of_another_process(run: Any, start_broker: Any, tmp_path: Path) -> None:
    start_broker("--data", str(tmp_path / "data"))
    line = failed(run, "--data", str(tmp_path / "data"), "--broker.port", "0")
    assert "another process has" in line


def test_folder_that_cannot_be(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = failed(run, "--data", str(tmp_path / "file" / "data"), "--broker.port", "0")
    assert str(tmp_path / "file") in line


def test_folder_that_may_not_be_written(run: Any) -> None:
    assert "/proc/broadsheet" in failed(run, "--data", "/proc/broadsheet", "--broker.port", "0")  # not even for root


def test_address_that_is_not_ours(run: Any, tmp_path: Path) -> None:
    line = failed(run, "--data", str(tmp_path / "data"), "--broker.host", "192.0.2.1", "--broker.port", "0")
    assert "failed to listen" in line


def test_file_root_that_is_missing(run: Any, tmp_path: Path) -> None:
    line = failed(run, "--data", str(tmp_path / "d"), "--broker.file-root", str(tmp_path / "no"), "--broker.port", "0")
    assert "configured local file:// root failed" in line


# --- On a terminal ---


def test_log_on_a_terminal(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    flags = ["--data", str(tmp_path / "d"), "--broker.port", "0"]
    command = [sys.executable, "-m", "broadsheet.cli.main", "serve", *flags]
    environment = {**os.environ, "NO_COLOR": "1"}
    process = subprocess.Popen(command, stderr=follower, env=environment)
    os.close(follower)
    text = ""
    try:
        while "starting broker" not in text or not text.endswith("\n"):
            text += os.read(leader, 4096).decode()
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    last = text.splitlines()[-1]
    assert re.fullmatch(
        r'INFO\[0000\] starting broker {31}endpoint="http://127\.0\.0\.1:\d+" id=[\w-]+ zone=local', last
    )
