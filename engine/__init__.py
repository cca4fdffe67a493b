"""The in-process library: an engine of journals, with no network in it.

    from broadsheet.engine import Engine

    async with Engine.open("data") as engine:
        journal = await engine.create_journal("examples/events")
        await journal.append(b"hello\\n")
        print(await journal.read())
"""

from broadsheet.engine.engine import Durability, Engine, EngineOptions
from broadsheet.engine.errors import (
    AppendAborted,
    AppendFailed,
    BroadsheetError,
    CorruptData,
    EngineClosed,
    EngineLocked,
    EngineWritesFailed,
    LocalError,
    NotAuthorized,
    OutcomeUnknown,
    RemoteError,
    SlowAppend,
    Status,
    StatusError,
    StorageError,
    ValidationError,
)
from broadsheet.engine.fragments.fragment import Fragment
from broadsheet.engine.handles import Appender, AppenderFull, Journal, Reader
from broadsheet.engine.journal.spec import (
    CompressionCodec,
    FragmentSpec,
    JournalChange,
    JournalFlags,
    JournalSpec,
)
from broadsheet.engine.labels import Label, LabelSelector, LabelSet, parse_selector
from broadsheet.engine.service import JournalService, Scope

__all__ = [
    "AppendAborted",
    "AppendFailed",
    "Appender",
    "AppenderFull",
    "BroadsheetError",
    "CompressionCodec",
    "CorruptData",
    "Durability",
    "Engine",
    "EngineClosed",
    "EngineLocked",
    "EngineOptions",
    "EngineWritesFailed",
    "Fragment",
    "FragmentSpec",
    "Journal",
    "JournalChange",
    "JournalFlags",
    "JournalService",
    "JournalSpec",
    "Label",
    "LabelSelector",
    "LabelSet",
    "LocalError",
    "NotAuthorized",
    "OutcomeUnknown",
    "Reader",
    "RemoteError",
    "Scope",
    "SlowAppend",
    "Status",
    "StatusError",
    "StorageError",
    "ValidationError",
    "parse_selector",
]
