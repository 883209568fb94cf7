"""A recorded conversation with a switch, made by hand, for tests of what is shown."""

from __future__ import annotations

from tests.test_plots import maps
from workbench.lab.results import RecordedTurn, Recording

ACCOUNT = {
    "source": "s", "target": "t", "how": "mapped", "tokens": 40, "reused": 0, "mapped": 20, "native": 20, "anchors": 4,
    "hold_back": 16, "ms": {"anchors": 5.0, "map_product": 9.0, "hold_back": 8.0, "total": 30.0}, "prefill_ms": 90.0,
    "prefill_source": "measured", "reason": "", "saved_ms": 60.0,
}  # fmt: skip
LITERAL = "<b>literal</b> & so on"


def recording() -> Recording:
    turns = (
        RecordedTurn("hello?", "small", "s", "native", None, ((10.0, "one "), (30.0, "two")), 2, 40.0, 0, 9),
        RecordedTurn("and?", "large", "t", "mapped", ACCOUNT, ((20.0, LITERAL),), 1, 30.0, 30, 4),
    )
    return Recording(turns, (1, 2, 3), {"greedy": True}, maps().provenance)
