"""`converse`: a conversation from a script, for tests, for figures, and to repeat what the page showed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import InputError
from workbench.models.catalog import SIDES, source_side
from workbench.words import lowest

if TYPE_CHECKING:
    from workbench.chat.conversation import Conversation
    from workbench.lab.recording import Recorder

HOWS = ("mapped", "prefill")
SCRIPT_LIMIT = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The script and the sampling settings."""
    parser.add_argument(
        "--script", type=Path, required=True, metavar="FILE",
        help='JSON list of {"say": text, "on": small|large, "how": mapped|prefill}; "-" reads standard input',
    )  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: the template's own)")
    parser.add_argument(
        "--greedy", action=argparse.BooleanOptionalAction, default=True, help="default: greedy"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--repetition-penalty", type=float, default=1.15, help="1: none (default: 1.15)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)"
    )
    parser.add_argument(
        "--anchors", type=int, metavar="M", help="first tokens run natively (default: the mapper's)"
    )
    parser.add_argument(
        "--hold-back", type=int, metavar="H", help="last tokens run natively (default: the mapper's)"
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="bars; a pair that misses them is not mapped, or with a warning",
    )
    parser.add_argument(
        "--measure-prefill", action="store_true", help="time the prefill that each switch avoided"
    )
    parser.add_argument(
        "--incremental",
        action="store_true",
        help="map each turn ahead, so that a switch pays only for what is new",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="save the conversation with its token times in this file"
    )
    parser.add_argument(
        "--save", action="store_true", help="save that recording for the page, beside the mapper"
    )


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """Hold the conversation; the script is read and checked before a model is loaded."""
    script = read_script(args.script)
    for name in ("anchors", "hold_back"):
        if (getattr(args, name) or 0) < 0:
            raise InputError(f"--{name.replace('_', '-')} must be 0 or more.")
    from workbench.approval import read_policy
    from workbench.chat.conversation import Conversation
    from workbench.chat.decode import Sampling
    from workbench.commands.common import host_from_args
    from workbench.lab.estimate import saved_prefill_times
    from workbench.lab.provenance import save_result
    from workbench.lab.recording import Recorder

    policy = read_policy(args.policy) if args.policy else None
    host, direction = host_from_args(args)
    sampling = Sampling(
        args.greedy,
        args.temperature,
        args.top_k,
        args.top_p,
        args.seed,
        args.max_new_tokens,
        args.repetition_penalty,
    )
    first = script[0].get("on") or source_side(direction)
    for side in dict.fromkeys([first, *(turn["on"] for turn in script if "on" in turn)]):
        host.model(side, progress)
    chat = Conversation(host, sampling, args.system, first, args.anchors, args.hold_back, args.incremental)
    chat.prefill_times = saved_prefill_times(host)
    chat.policy = policy
    turns, recorder = [], Recorder()
    for number, turn in enumerate(script):
        progress(number / len(script), f"Turn {number + 1} of {len(script)}")
        turns.append(play(chat, turn, args.measure_prefill, recorder))
    result = {"pair": host.pair.name, "turns": turns, "token_ids": chat.token_ids}
    places = [args.record] if args.record else []
    places += [host.mapper_folder(direction) / "recording.json"] if args.save else []
    recording = recorder.recording(chat, direction, script) if places else None
    return result | ({"saved": [str(save_result(recording, place)) for place in places]} if places else {})


def play(chat: Conversation, turn: dict[str, str], measure: bool, recorder: Recorder) -> dict[str, Any]:
    """One turn of the script: switch first if it is on the other side, then say what there is to say."""
    account = None
    if turn.get("on", chat.side) != chat.side:
        account = chat.switch(turn["on"], turn.get("how", "mapped"))
        if measure and account.tokens:
            account = chat.measure_prefill()
    if "say" not in turn:
        name = chat.host.name(chat.side)
        how = account.how if account else "native"
        shown = account.to_json() if account else None
        recorder.switched(chat, account)
        return {"model": name, "side": chat.side, "how": how, "text": "", "token_ids": [], "account": shown}
    message = recorder.said(turn["say"], chat.send(turn["say"]))
    data = message.to_json()
    names = ("model", "side", "how", "text", "token_ids", "account")
    extra = ("stopped", "notice", "reused", "native", "rerun", "ms", "tokens_per_second")
    return {name: data[name] for name in (*names, *extra)}


def read_script(path: Path) -> list[dict[str, str]]:
    """The turns of a script.

    Raises:
        InputError: naming the turn that cannot be played.
    """
    try:
        if str(path) == "-":
            text = sys.stdin.read(SCRIPT_LIMIT + 1)
        else:
            if not path.is_file():
                raise InputError(f"There is no script {path.name!r}.")
            text = path.read_bytes()[: SCRIPT_LIMIT + 1].decode("utf-8")
        turns = json.loads(text) if len(text) <= SCRIPT_LIMIT else None
    except (OSError, ValueError, RecursionError):
        raise InputError(f"The script {path.name!r} cannot be read as JSON.") from None
    if not isinstance(turns, list) or not turns:
        raise InputError("The script must be a JSON list of turns, with at least one.")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not all(isinstance(value, str) for value in turn.values()):
            raise InputError(f"Turn {number} of the script must be an object of texts.")
        if unknown := set(turn) - {"say", "on", "how"}:
            raise InputError(
                f"Turn {number} of the script has {sorted(unknown)[0]!r}; known are say, on and how."
            )
        if turn.get("on", "small") not in SIDES or turn.get("how", "mapped") not in HOWS:
            raise InputError(f"Turn {number} of the script: `on` is small or large, `how` mapped or prefill.")
        if "say" in turn and not turn["say"].strip():
            raise InputError(f"Turn {number} of the script says nothing.", "Leave `say` out to switch only.")
        if "say" not in turn and "on" not in turn:
            raise InputError(f"Turn {number} of the script neither says anything nor switches.")
    return turns


def show(result: dict[str, Any]) -> str:
    """The conversation, with the account of each switch."""
    lines = []
    last = None
    for turn in result["turns"]:
        account = turn["account"]
        if account and account != last:
            kind = " by an estimate" if account["prefill_source"] == "estimated" else ""
            saved = f", saved {account['saved_ms']:.0f} ms{kind}" if account["saved_ms"] is not None else ""
            lines.append(
                f"-- {account['source']} -> {account['target']}: {account['how']}; "
                f"reused {account['reused']}, mapped {account['mapped']}, run natively {account['native']} "
                f"of {account['tokens']} tokens; "
                + (
                    f"{lowest(account['native_layers'])} run natively over what is mapped; "
                    if account["native_layers"]
                    else ""
                )
                + (
                    f"{account['mapped_ahead']} mapped ahead in {account['ahead_ms']:.0f} ms; "
                    if account["mapped_ahead"]
                    else ""
                )
                + f"{account['ms']['total']:.0f} ms{saved}"
                + (f" ({account['reason']})" if account["reason"] else "")
            )
        last = account or last
        if turn["token_ids"] or turn["text"]:
            lines.append(f"[{turn['model']}, {turn['how']}] {turn['text']}")
    lines += [f"Saved as {place}" for place in result.get("saved", [])]
    return "\n".join(lines)
