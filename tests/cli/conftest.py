"""`broadsheet` as a process, and a broker that runs for all tests of a module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

PROGRAM = [sys.executable, "-m", "broadsheet.cli.main"]
TIMEOUT_S = 30


def environment(**more: str) -> dict[str, str]:
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**keep, "PYTHONUNBUFFERED": "1", **more}


@dataclass
class Broker:
    """A `serve` process. Its log lines are read as they come; `until` waits for one."""

    process: subprocess.Popen[bytes]
    lines: list[dict[str, Any]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    ended: bool = False
    address: str = ""

    def read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.changed:
                self.lines.append(json.loads(line))
                self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def until(self, message: str, count: int = 1) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines if line["msg"] == message]

        with self.changed:
            assert self.changed.wait_for(lambda: len(found()) >= count or self.ended, TIMEOUT_S), self.lines
        assert len(found()) >= count, self.lines
        return found()[count - 1]

    def messages(self) -> list[str]:
        return [line["msg"] for line in self.lines]


@pytest.fixture(scope="module")
def start_broker() -> Iterator[Callable[..., Broker]]:
    """`start_broker(*flags)`: a broker that is ready; killed in the end if it still runs."""
    running: list[Broker] = []

    def start(*flags: str, env: dict[str, str] | None = None) -> Broker:
        command = [*PROGRAM, "serve", "--broker.port", "0", "--log.format", "json", *flags]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(**(env or {})))
        broker = Broker(process)
        thread = threading.Thread(target=broker.read_log, daemon=True)
        thread.start()
        running.append(broker)
        broker.address = broker.until("starting broker")["endpoint"]
        return broker

    yield start
    for broker in running:
        broker.process.kill()
        broker.process.wait()


@dataclass
class Done:
    """What a command ended with."""

    status: int
    out: str
    err: str
    raw: bytes

    @property
    def last_line(self) -> str:
        return self.err.rstrip("\n").rpartition("\n")[2]


@pytest.fixture(scope="session")
def run() -> Callable[..., Done]:
    """`run(*arguments, input=…, env=…)`: one command to its end."""

    def run_command(*arguments: str, input: bytes = b"", env: dict[str, str] | None = None) -> Done:
        done = subprocess.run(
            [*PROGRAM, *arguments],
            input=input,
            capture_output=True,
            timeout=TIMEOUT_S,
            env=environment(**(env or {})),
            check=False,
        )
        return Done(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode(), done.stdout)

    return run_command


@pytest.fixture(scope="module")
def broker(start_broker: Callable[..., Broker], tmp_path_factory: pytest.TempPathFactory) -> Broker:
    folder = tmp_path_factory.mktemp("data")
    return start_broker("--data", str(folder), "--broker.durability", "os")


@pytest.fixture(scope="module")
def journals(run: Callable[..., Done], broker: Broker) -> Callable[..., Done]:
    """`journals(*arguments)`: `broadsheet journals …` on the module's broker."""

    def run_journals(*arguments: str, **options: Any) -> Done:
        options.setdefault("env", {"BROKER_ADDRESS": broker.address})
        return run("journals", *arguments, **options)

    return run_journals


@pytest.fixture
def popen() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`popen(*arguments)`: a command that is left running, with pipes; killed in the end."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen([*PROGRAM, *arguments], env=environment(**(env or {})), **pipes)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()

