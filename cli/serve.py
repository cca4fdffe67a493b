"""`broadsheet serve`: an engine on a folder, shown over HTTP."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from importlib.metadata import version

import trio

from broadsheet.cli.logs import CommandFailed, log
from broadsheet.engine.engine import Engine
from broadsheet.engine.errors import BroadsheetError
from broadsheet.facades.http import open_listeners, serve_http

__all__ = ["ServeOptions", "run"]

_SIGNAL_NAMES = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupt"}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Rates are in bytes per second."""

    data: str
    host: str
    port: int
    durability: str
    min_append_rate: int
    max_append_rate: int
    file_root: str | None
    allow_origins: tuple[str, ...]


def run(options: ServeOptions) -> None:
    """Serve until a signal. Raises `CommandFailed` with one line for what a user can mend."""
    problem: Exception
    try:
        trio.run(_serve, replace(options, data=os.path.abspath(options.data)))
        return
    except* (BroadsheetError, OSError, CommandFailed) as group:
        problem = _first(group)
    if isinstance(problem, CommandFailed):
        raise problem
    raise CommandFailed("failed to serve", err=_text(problem), data=options.data)


async def _serve(options: ServeOptions) -> None:
    engine = _make_engine(options)
    try:
        listeners = await open_listeners(options.host, options.port)
    except OSError as error:
        raise CommandFailed(
            "failed to listen",
            err=_text(error),
            address=f"{options.host}:{options.port}",
            hint="choose another with --broker.port or --broker.host",
        ) from None
    host, port = listeners[0].socket.getsockname()[:2]
    endpoint = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info(
        "broker configuration",
        extra={
            "fields": {
                "data": "" if options.durability == "memory" else options.data,
                "durability": options.durability,
                "maxAppendRate": options.max_append_rate,
                "minAppendRate": options.min_append_rate,
                "version": version("broadsheet"),
            }
        },
    )
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(_watch_signals, engine, shutdown)
        async with engine:
            engine.advertise(endpoint)
            log.info(
                "starting broker",
                extra={
                    "fields": {
                        "endpoint": endpoint,
                        "id": engine.process_id.suffix,
                        "zone": engine.process_id.zone,
                    }
                },
            )
            await serve_http(
                engine,
                listeners=listeners,
                ready_problem=engine.ready_problem,
                allow_origins=options.allow_origins,
                shutdown=shutdown,
            )
        nursery.cancel_scope.cancel()
    log.info("goodbye")


def _make_engine(options: ServeOptions) -> Engine:
    if options.durability == "memory":
        return Engine.in_memory(
            min_append_rate=options.min_append_rate, max_append_rate=options.max_append_rate
        )
    if options.file_root is not None and not os.path.isdir(options.file_root):
        raise CommandFailed("configured local file:// root failed", err="no such folder", path=options.file_root)
    return Engine.open(
        options.data,
        durability=options.durability,
        file_root=options.file_root,
        min_append_rate=options.min_append_rate,
        max_append_rate=options.max_append_rate,
    )


async def _watch_signals(
    engine: Engine, shutdown: trio.Event, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """The first signal drains, the second ends the process where it stands (which loses nothing acknowledged)."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            log.info("caught signal", extra={"fields": {"signal": _SIGNAL_NAMES[signal.Signals(number)]}})
            if shutdown.is_set():
                os._exit(1)
            shutdown.set()
            await engine.drain()


def _first(error: BaseException) -> Exception:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)
