"""Asserts of the suites tell what they compared."""

import pytest

pytest.register_assert_rewrite("broadsheet.testing.conformance.journal_service")
