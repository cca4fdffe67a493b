"""The in-process library: an engine of journals, with no network in it."""
