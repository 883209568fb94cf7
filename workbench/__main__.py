"""The command line: `python -m workbench COMMAND`.

With `--json` the last line of standard output is one JSON object, otherwise there is a table for people. An
error is one sentence on standard error, with exit status 2 when what was asked for cannot be done as it
stands, and 1 when it failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from workbench.commands import COMMANDS
from workbench.commands.common import StderrProgress, add_common_arguments, jsonable, prepare_environment
from workbench.errors import InputError, WorkbenchError, out_of_memory


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Raises `InputError`."""
        raise InputError(f"{message[:1].upper()}{message[1:].rstrip('.')}.", f"See `{self.prog} --help`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: without the program's name; None for the process's own.

    Returns:
        The exit status.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    progress = StderrProgress()
    debug = "--debug" in argv
    try:
        return _run(argv, progress)
    except WorkbenchError as error:
        progress.close()
        if debug:
            traceback.print_exc()
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        progress.close()
        print("Stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has gone
        return 1
    except Exception as error:
        progress.close()
        if debug:
            traceback.print_exc()
        if (asked := out_of_memory(error)) is not None:
            print(f"There was not enough memory for this{asked}.", file=sys.stderr)
            return 1
        what = " ".join(str(error).split())[:300]
        print(f"{type(error).__name__}: {what} (--debug shows where).", file=sys.stderr)
        return 1


def _run(argv: list[str], progress: StderrProgress) -> int:
    parser = Parser(
        prog="python -m workbench", description="Change models mid-conversation, and see what it costs."
    )
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (path, takes_pair, help_line) in COMMANDS.items():
        command = parsers.add_parser(name, help=help_line, description=help_line)
        if name == chosen:
            module = importlib.import_module(path)
            module.add_arguments(command)
            add_common_arguments(command, takes_pair)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    prepare_environment(args)
    try:
        result = module.run(args, progress)
    finally:
        progress.close()
    print(json.dumps(jsonable(result), allow_nan=False) if args.json else module.show(result), flush=True)
    return int(result.get("exit_status", 1 if result.get("ok") is False else 0))


if __name__ == "__main__":
    sys.exit(main())
