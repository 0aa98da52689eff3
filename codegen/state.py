"""The record that a GPU kernel keeps of its launches: int64 words, a row a rank.

Its epoch, then the first wait that gave up: failed, worker, position in the queue, wait site,
index of the counter, count expected and observed.
"""

from __future__ import annotations

STATE_WORDS = 8
EPOCH, FAILED, WORKER, ENTRY, SITE, INDEX, EXPECTED, OBSERVED = range(STATE_WORDS)
RECORD = WORKER, ENTRY, SITE, INDEX, EXPECTED, OBSERVED
ENTRY_SITE = -1
"""Site number of the wait for all ranks at the start of a launch."""
