"""Broadsheet: an embedded journal engine with pluggable network facades."""
