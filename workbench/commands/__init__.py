"""The sub-commands, by name.

Each is a module, imported only when it is asked for:

* `add_arguments(parser)`: its own options (what all commands share is in `common.py`);
* `run(args, progress) -> dict`: does it; the JSON object. Heavy imports belong in here, so that `--help` is fast;
* `show(result) -> str`: the same for people.
"""

from __future__ import annotations

# name -> (module, whether it takes a pair, help). Written out, so that the list needs no imports.
COMMANDS: dict[str, tuple[str, bool, str]] = {
    "doctor": (
        "workbench.commands.doctor",
        True,
        "check weights, mappers and devices; --fetch gets what is missing",
    ),
    "pairs": ("workbench.commands.pairs", True, "list pairs, what is compatible with what, and why not"),
    "plan": (
        "workbench.commands.plan",
        True,
        "say what a pair needs in memory and where to put it, before anything is loaded",
    ),
    "fit": (
        "workbench.commands.fit",
        True,
        "fit a mapper from one model's KV cache to the other's and save it",
    ),
    "converse": ("workbench.commands.converse", True, "hold a scripted conversation that changes models"),
    "compare": (
        "workbench.commands.compare",
        True,
        "continue a text from the mapped cache, a true prefill and the source",
    ),
    "heads": ("workbench.commands.heads", True, "measure how well each head is mapped"),
    "bench": ("workbench.commands.bench", True, "time mapping against true prefill over context lengths"),
    "evaluate": ("workbench.commands.evaluate", True, "measure what mapping keeps, with controls"),
    "report": (
        "workbench.commands.report",
        True,
        "write everything saved for a pair as one page that opens offline",
    ),
    "cascade": (
        "workbench.commands.cascade",
        True,
        "calibrate when the large model takes over from an unsure small one",
    ),
    "correlate": (
        "workbench.commands.correlate",
        False,
        "which head metric foretells what a mapper keeps, over saved results",
    ),
    "variants": (
        "workbench.commands.variants",
        True,
        "fit and measure many variants of a mapper: which head metric foretells what is kept",
    ),
    "drift": ("workbench.commands.drift", True, "measure what repeated handoffs add, turn by turn"),
    "harness": (
        "workbench.commands.harness",
        True,
        "tasks of a hub or of your own, through lm-evaluation-harness",
    ),
    "family": ("workbench.commands.family", False, "build the small embedded model again from the large one"),
}
