"""The watch stream of the engine: the coordinator's events, as the selector and the claims show them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Protocol

import trio

from broadsheet.engine.catalog import Catalog, decode_item, item_name
from broadsheet.engine.coordinator import KeyEvents
from broadsheet.engine.journal.spec import JournalSpec
from broadsheet.engine.labels import LabelSelector
from broadsheet.engine.service import Header, Route, Scope, WatchChange

__all__ = ["EngineWatch", "WatchHost"]


class WatchHost(Protocol):
    catalog: Catalog

    @property
    def is_draining(self) -> bool: ...

    def route(self) -> Route: ...

    def unrouted_header(self) -> Header: ...

    def watching(self, cancel_scope: trio.CancelScope, *, begins: bool) -> None:
        """A wait that `drain` must end begins, or is over."""
        ...


class EngineWatch:
    """A `WatchStream`. `resumes`: the events begin where another watch ended, so there is no first listing; a
    journal that is not selected (any more) is then told of as deleted, whether that watch had shown it or not."""

    def __init__(
        self,
        host: WatchHost,
        selector: LabelSelector,
        scope: Scope,
        events: AsyncIterator[KeyEvents],
        *,
        resumes: bool,
    ) -> None:
        self._host = host
        self._selector = selector.with_prefix_rewritten()
        self._claimed = scope.claims.selector.with_prefix_rewritten() if scope.claims is not None else None
        self._scope = scope
        self._events = events
        self._resumes = resumes
        self._first_revision = 0
        self._shown: set[str] | None = set() if resumes else None

    def __aiter__(self) -> EngineWatch:
        return self

    async def __anext__(self) -> WatchChange:
        if self._shown is None:
            await trio.lowlevel.checkpoint()
            return self._first()
        while True:
            events = await self._next_events()
            if events is None:
                raise StopAsyncIteration
            change = self._change(events, self._shown)
            if change is not None:
                return change

    def _first(self) -> WatchChange:
        catalog, route = self._host.catalog, self._host.route()
        names = catalog.select(self._selector, self._scope.claims)
        self._shown = set(names)
        self._first_revision = self._host.unrouted_header().etcd.revision
        entries = [catalog.get(name) for name in names]
        return WatchChange(
            self._host.unrouted_header(), tuple(entry.listed(route) for entry in entries if entry is not None)
        )

    def _change(self, events: KeyEvents, shown: set[str]) -> WatchChange | None:
        route = self._host.route()
        upserted, deleted = [], []
        for key in events.deleted:
            name = item_name(key)
            if self._resumes or name in shown:
                shown.discard(name)
                deleted.append(name)
        for item in events.put:
            if item.mod_revision <= self._first_revision:
                continue  # it came between the watch's begin and the first listing, which had it
            entry = decode_item(item)
            name = entry.spec.name
            if self._is_shown(entry.spec):
                shown.add(name)
                upserted.append(entry.listed(route))
            elif self._resumes or name in shown:
                shown.discard(name)
                deleted.append(name)
        if not upserted and not deleted:
            return None
        upserted.sort(key=lambda listed: listed.spec.name)
        return WatchChange(self._host.unrouted_header(), tuple(upserted), tuple(sorted(deleted)))

    async def _next_events(self) -> KeyEvents | None:
        """None at the end: the engine is closing, or the scope's deadline passed."""
        if self._host.is_draining:
            return None
        deadline = self._scope.deadline
        with trio.CancelScope(deadline=math.inf if deadline is None else deadline) as cancel_scope:
            self._host.watching(cancel_scope, begins=True)
            try:
                return await anext(self._events)
            finally:
                self._host.watching(cancel_scope, begins=False)
        return None

    def _is_shown(self, spec: JournalSpec) -> bool:
        labels = spec.labels.with_name_label(spec.name)
        return self._selector.matches(labels) and (self._claimed is None or self._claimed.matches(labels))
