"""`./run demo`: what a broker promises, shown with curl on a real one. Exits with 1 if a promise is broken.

1. A broker is started on an empty folder, and a YAML file of journal specs applied to it.
2. curl appends and reads.
3. Twenty appenders race with the lines of a web server's log. Every append must be whole, at the offsets it was told,
   and one blocking read, begun before, must see them all.
4. The broker is killed with SIGKILL while eight appenders are at work, and started again. Every append that was
   acknowledged must be there, byte for byte; each other one wholly or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAM = [sys.executable, "-m", "broadsheet.cli.main"]
APPENDERS = 20
LINES_PER_APPEND = 5
KILLED_APPENDERS = 8
ACKNOWLEDGED_BEFORE_KILL = 300
START_TIMEOUT_S = 20.0
CURL_TIMEOUT_S = "20"


class Broken(Exception):
    """A promise was not kept, or the demo cannot run here."""


def say(text: str) -> None:
    print(text, flush=True)


def check(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)
    say(f"   ok: {text}")


# --- The broker -------------------------------------------------------------------------------------------


class Broker:
    """`broadsheet serve` as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self._log = folder / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [*PROGRAM, "serve", "--data", str(self.folder / "data"), "--broker.port", str(self.port)]
        with open(self._log, "ab") as log:
            begin = log.tell()
            self._process = subprocess.Popen([*command, "--log.format", "json"], stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for line in self._log.read_bytes()[begin:].splitlines():
                entry = _parse(line)
                if entry.get("msg") == "starting broker":
                    self.port = int(str(entry["endpoint"]).rpartition(":")[2])
                    say(f"   broker {entry['zone']}/{entry['id']} at {self.url}, process {self._process.pid}")
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise Broken("the broker did not start:\n" + self._log.read_text(errors="replace"))

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def clean_up(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


def _parse(line: bytes) -> dict[str, object]:
    try:
        value: dict[str, object] = json.loads(line)
    except ValueError:
        return {}
    return value


def broadsheet(broker: Broker, *arguments: str) -> str:
    done = subprocess.run(
        [*PROGRAM, "journals", *arguments, "--broker.address", broker.url], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Broken(f"broadsheet journals {' '.join(arguments)} failed: {done.stderr}")
    return done.stdout + done.stderr


# --- curl -------------------------------------------------------------------------------------------------


@dataclass
class Append:
    """One append: what was sent, and the range it was told, if it was acknowledged."""

    content: bytes
    begin: int = -1
    end: int = -1
    status: str = ""

    @property
    def acknowledged(self) -> bool:
        return self.end >= 0


def curl(*arguments: str, content: bytes | None = None) -> bytes:
    done = subprocess.run(
        ["curl", "-sS", "--max-time", CURL_TIMEOUT_S, *arguments], input=content, capture_output=True, check=False
    )
    return done.stdout


def put(broker: Broker, journal: str, content: bytes) -> Append:
    """Append with curl. Without an answer, or with another than 204, it is not acknowledged."""
    reply = curl("-i", "-X", "PUT", "--data-binary", "@-", f"{broker.url}/{journal}", content=content)
    head = reply.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    fields = dict(line.split(": ", 1) for line in head[1:])
    append = Append(content, status=head[0])
    if head[0].startswith("HTTP/1.1 204"):
        append.begin, append.end = int(fields["X-Commit-Begin"]), int(fields["X-Commit-End"])
    return append


# --- The acts ---------------------------------------------------------------------------------------------


def hello(broker: Broker) -> None:
    say("\n2. Append and read with curl")
    lines = b'{"Msg": "Hello, Broadsheet!"}\n{"Msg": "See you later alligator"}\n'
    append = put(broker, "demo/hello", lines)
    check(append.acknowledged and (append.begin, append.end) == (0, len(lines)), f"PUT answered {append.status[9:]}")
    check(curl(f"{broker.url}/demo/hello") == lines, "GET gives back what was put")
    check(curl(f"{broker.url}/demo/hello?offset=16") == lines[16:], "GET ?offset=16 begins at byte 16")
    check(b"404" in curl("-i", f"{broker.url}/demo/none"), "a journal that is not there is 404")


def race(broker: Broker, lines: list[bytes], folder: Path) -> None:
    say(f"\n3. {APPENDERS} appenders race with {len(lines)} lines of a web server's log")
    tail_path = folder / "tail"
    appends: list[Append] = []
    with blocking_read(broker, "demo/logs/raced", tail_path):

        def work(number: int) -> None:
            mine = lines[number::APPENDERS]
            for at in range(0, len(mine), LINES_PER_APPEND):
                content = b"".join(mine[at : at + LINES_PER_APPEND])
                appends.append(put(broker, "demo/logs/raced", content))

        run_threads(APPENDERS, work)
        failed = [append.status for append in appends if not append.acknowledged]
        check(not failed, f"all {len(appends)} appends were acknowledged {failed or ''}".rstrip())
        content = curl(f"{broker.url}/demo/logs/raced")
        check(
            all(content[append.begin : append.end] == append.content for append in appends),
            "each is whole, at exactly the offsets it was told",
        )
        appends.sort(key=lambda append: append.begin)
        ends = [0, *(append.end for append in appends)]
        check(
            [append.begin for append in appends] == ends[:-1] and ends[-1] == len(content),
            f"they follow each other without gap or overlap, {len(content)} bytes in all",
        )
        check(sorted(content.splitlines(True)) == sorted(lines), "every line of the log is there once")
        deadline = time.monotonic() + 10
        while tail_path.stat().st_size < len(content) and time.monotonic() < deadline:
            time.sleep(0.02)
        check(tail_path.read_bytes() == content, "one blocking read, begun before, saw all of it")


@contextmanager
def blocking_read(broker: Broker, journal: str, path: Path) -> Iterator[None]:
    """A curl that tails the journal into a file."""
    with open(path, "wb") as out:
        command = ["curl", "-sSN", f"{broker.url}/{journal}?block=true"]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@dataclass
class Load:
    """Appends of several threads, until the broker is gone."""

    appends: list[Append] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)


def kill(broker: Broker, lines: list[bytes]) -> None:
    say(f"\n4. kill -9 while {KILLED_APPENDERS} appenders are at work")
    load = Load()

    def work(number: int) -> None:
        at = number * 7
        while not load.stop.is_set():
            tag = b"appender %d append %d\n" % (number, at)
            content = tag + b"".join(lines[(at + k) % len(lines)] for k in range(LINES_PER_APPEND))
            append = put(broker, "demo/logs/killed", content)
            load.appends.append(append)
            if not append.acknowledged:
                return
            at += 1
            if sum(one.acknowledged for one in load.appends) >= ACKNOWLEDGED_BEFORE_KILL:
                load.enough.set()

    threads = threading.Thread(target=run_threads, args=(KILLED_APPENDERS, work))
    threads.start()
    in_time = load.enough.wait(30)
    broker.kill()
    load.stop.set()
    threads.join()
    acknowledged = [append for append in load.appends if append.acknowledged]
    lost = [append for append in load.appends if not append.acknowledged]
    check(in_time, f"killed after {len(acknowledged)} acknowledged appends, {len(lost)} got no answer")
    begin = time.monotonic()
    broker.start()
    content = curl(f"{broker.url}/demo/logs/killed")
    say(f"   restarted; it answers {1000 * (time.monotonic() - begin):.0f} ms after it was started")
    check(
        all(content[append.begin : append.end] == append.content for append in acknowledged),
        f"all {len(acknowledged)} acknowledged appends are there, byte for byte",
    )
    present = whole_appends(content, acknowledged, lost)
    check(present >= 0, f"of the {len(lost)} others, {max(present, 0)} are there whole and the rest not at all")
    more = put(broker, "demo/logs/killed", lines[0])
    check(more.acknowledged and more.begin == len(content), f"and it goes on: the next append begins at {len(content)}")


def whole_appends(content: bytes, acknowledged: list[Append], lost: list[Append]) -> int:
    """How many of the unacknowledged appends are in the content; -1 if it holds anything that is no whole append."""
    ends = {append.begin: append.end for append in acknowledged}
    left = [append.content for append in lost]
    at = count = 0
    while at < len(content):
        if at in ends:
            at = ends[at]
            continue
        found = next((one for one in left if content.startswith(one, at)), None)
        if found is None:
            return -1
        left.remove(found)
        at += len(found)
        count += 1
    return count


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(count - 1)`, each in a thread, to their ends."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    if shutil.which("curl") is None:
        raise Broken("curl is not installed, and this demo is made of it. (Debian: apt install curl)")
    os.environ.pop("BROKER_ADDRESS", None)
    lines = (HERE / "access.log").read_bytes().splitlines(True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="broadsheet-demo-") as name:
        folder = Path(name)
        broker = Broker(folder)
        try:
            say("1. A broker on an empty folder, and journals from a YAML file")
            broker.start()
            say("   " + broadsheet(broker, "apply", "--specs", str(HERE / "journals.yaml")).strip())
            table = broadsheet(broker, "list", "-l", "prefix=demo/", "--primary", "--rf", "--stores")
            say("".join(f"   {line}\n" for line in table.splitlines()).rstrip())
            hello(broker)
            race(broker, lines, folder)
            kill(broker, lines)
            say("\n5. SIGTERM")
            check(broker.stop() == 0, "the broker drained and exited with status 0")
        finally:
            broker.clean_up()
    say(f"\nEverything held. ({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    try:
        main()
    except Broken as broken:
        print(f"\nFAILED: {broken}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
