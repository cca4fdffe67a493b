"""The commands and their options (spec/cli.md). What they do is in other modules, imported when they run, so that
`--help` and completion are quick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from broadsheet.cli.logs import LEVELS, CommandFailed, fatal, set_up_logging

__all__ = ["main"]

DEFAULT_ADDRESS = "http://localhost:8080"

F = TypeVar("F", bound=Callable[..., Any])


def _log_options(*, environment: bool) -> Callable[[F], F]:
    """`--log.level` and `--log.format`; without a default where an outer command has them too."""

    def decorate(command: F) -> F:
        style = click.option(
            "--log.format",
            "log_format",
            type=click.Choice(["text", "json", "color"]),
            default="text" if environment else None,
            show_default=environment,
            envvar="LOG_FORMAT" if environment else None,
            help="Form of the log on stderr.",
        )
        level = click.option(
            "--log.level",
            "log_level",
            type=click.Choice(list(LEVELS)),
            default="info" if environment else None,
            show_default=environment,
            envvar="LOG_LEVEL" if environment else None,
            help="Least level that is logged.",
        )
        return level(style(command))

    return decorate


def _address_option(*, environment: bool) -> Callable[[F], F]:
    return click.option(
        "--broker.address",
        "address",
        metavar="URL",
        default=DEFAULT_ADDRESS if environment else None,
        show_default=environment,
        envvar="BROKER_ADDRESS" if environment else None,
        help="Broker to talk to.",
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="broadsheet", prog_name="broadsheet")
def cli() -> None:
    """Journals: append-only byte logs with labels, compatible with Gazette.

    `serve` runs a broker; `journals` works with the journals of one.
    """


@cli.command()
@click.option(
    "--data",
    metavar="DIR",
    default="broadsheet-data",
    show_default=True,
    envvar="BROADSHEET_DATA",
    help="Folder that holds everything; made if it is missing.",
)
@click.option(
    "--broker.host",
    "host",
    default="127.0.0.1",
    show_default=True,
    envvar="BROKER_HOST",
    help="Address to listen on.",
)
@click.option(
    "--broker.port",
    "port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    envvar="BROKER_PORT",
    help="Port to listen on; 0 for any free one.",
)
@click.option(
    "--broker.durability",
    "durability",
    type=click.Choice(["fsync", "os", "memory"]),
    default="fsync",
    show_default=True,
    envvar="BROKER_DURABILITY",
    help="What an acknowledged append survives: power loss, the death of the process, or nothing.",
)
@click.option(
    "--broker.min-append-rate",
    "min_append_rate",
    type=click.IntRange(min=0),
    default=65536,
    show_default=True,
    envvar="BROKER_MIN_APPEND_RATE",
    metavar="BYTES/S",
    help="Slower appenders are aborted.",
)
@click.option(
    "--broker.max-append-rate",
    "max_append_rate",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    envvar="BROKER_MAX_APPEND_RATE",
    metavar="BYTES/S",
    help="Most that a journal takes, whatever its spec says; 0 for no limit.",
)
@click.option(
    "--broker.file-root",
    "file_root",
    metavar="DIR",
    envvar="BROKER_FILE_ROOT",
    help="Folder where file:// fragment stores begin, instead of one in the data folder.",
)
@click.option(
    "--broker.allow-origin",
    "allow_origins",
    metavar="ORIGIN",
    multiple=True,
    envvar="BROKER_ALLOW_ORIGIN",
    help="CORS origin of /v1/; may be repeated.",
)
@_log_options(environment=True)
def serve(log_level: str, log_format: str, **options: Any) -> None:
    """Run a broker on a folder, until SIGTERM or SIGINT."""
    set_up_logging(log_level, log_format)
    from broadsheet.cli.serve import ServeOptions, run

    run(ServeOptions(**options))


# --- journals ---------------------------------------------------------------------------------------------


@cli.group()
@_address_option(environment=True)
@_log_options(environment=True)
@click.pass_context
def journals(ctx: click.Context, /, **options: Any) -> None:
    """Work with the journals of a broker."""
    ctx.obj = options


def _journals_command(name: str) -> Callable[[F], click.Command]:
    """A sub-command of `journals`: takes the group's options too, after it or before, and sets up logging."""

    def decorate(command: F) -> click.Command:
        @click.pass_context
        def run(ctx: click.Context, /, **options: Any) -> None:
            common = {
                key: options.pop(key) or ctx.obj[key] for key in ("address", "log_level", "log_format")
            }
            set_up_logging(common["log_level"], common["log_format"])
            command(common["address"], **options)

        run.__doc__ = command.__doc__
        run.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
        decorated = _address_option(environment=False)(_log_options(environment=False)(run))
        return journals.command(name)(decorated)

    return decorate


_selector = click.option("-l", "--selector", metavar="SELECTOR", help="Label selector of journals.")
_journal = click.option("--journal", metavar="NAME", help="Name of one journal, instead of a selector.")


@_journals_command("list")
@click.option("-l", "--selector", metavar="SELECTOR", default="", help="Label selector; all journals without.")
@click.option(
    "-o",
    "--format",
    "style",
    type=click.Choice(["table", "yaml", "json"]),
    default="table",
    show_default=True,
    help="yaml is ready for apply.",
)
@click.option("-L", "--label-columns", "labels", metavar="LABEL", multiple=True, help="Column of a label's values.")
@click.option("-p", "--primary", is_flag=True, help="Column of the primary broker.")
@click.option("-r", "--replicas", is_flag=True, help="Column of the other brokers.")
@click.option("--rf", is_flag=True, help="Column of the replication factor.")
@click.option("--stores", is_flag=True, help="Column of the first fragment store.")
def list_(address: str, **options: Any) -> None:
    """List journals."""
    from broadsheet.cli.journals import list_journals

    list_journals(address, **options)


@_journals_command("apply")
@click.option("--specs", metavar="PATH", default="-", show_default=True, help="YAML of journal specs; - is stdin.")
@click.option(
    "--max-txn-size",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Most changes to apply at once; 0 applies all or none.",
)
def apply(address: str, **options: Any) -> None:
    """Create, change and delete journals as a YAML file says."""
    from broadsheet.cli.journals import apply_specs

    apply_specs(address, **options)


@_journals_command("append")
@_selector
@_journal
@click.option("-i", "--input", "path", metavar="PATH", default="-", show_default=True, help="Content; - is stdin.")
def append(address: str, **options: Any) -> None:
    """Append a file or stdin to a journal, as one atomic append (a random one of those selected)."""
    from broadsheet.cli.journals import append_content

    append_content(address, **options)


@_journals_command("read")
@_selector
@_journal
@click.option("--offset", type=click.IntRange(min=-1), help="Byte to begin at; -1 is the end. Default 0.")
@click.option("-b", "--block", is_flag=True, help="Wait for more at the end, for ever.")
@click.option("--tail", is_flag=True, help="Begin at the end.")
@click.option("-o", "--output", "path", metavar="PATH", default="-", show_default=True, help="- is stdout.")
def read(address: str, **options: Any) -> None:
    """Write the content of journals to stdout."""
    from broadsheet.cli.journals import read_content

    read_content(address, **options)


@_journals_command("fragments")
@click.option("-l", "--selector", metavar="SELECTOR", default="", help="Label selector; all journals without.")
@_journal
@click.option(
    "-o", "--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@click.option("--from", "begin", metavar="UNIX", type=int, default=0, help="Skip fragments persisted before.")
@click.option("--to", "end", metavar="UNIX", type=int, default=0, help="Skip fragments persisted after, or not yet.")
@click.option("--url-ttl", metavar="DURATION", default="0s", help="Also give URLs, signed for so long.")
def fragments(address: str, **options: Any) -> None:
    """List the fragments of journals."""
    from broadsheet.cli.journals import list_fragments

    list_fragments(address, **options)


def main() -> None:
    """Entry point of the `broadsheet` script. Exit status: 0 done, 1 failed, 2 wrong usage."""
    try:
        cli()
    except CommandFailed as failure:
        fatal(failure.message, **failure.fields)


if __name__ == "__main__":
    main()
