"""`./run bench`: about a minute; prints each figure with its gate. Missed gates are reported, not failed."""

from __future__ import annotations

import platform
import sys
import tempfile
import time

from bench import engine
from bench.report import Report


def main() -> None:
    report = Report()
    begin = time.perf_counter()
    parts = sys.argv[1:] or ["engine", "http"]
    print(f"Python {platform.python_version()}, {platform.machine()}, medians of {engine.ROUNDS}")
    with tempfile.TemporaryDirectory(prefix="broadsheet-bench-") as where:
        if "engine" in parts:
            engine.run(report, where)
        if "http" in parts:
            from bench import http

            http.run(report, where)
    print(f"{report.summary()}; {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
