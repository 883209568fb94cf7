"""A conversation with the accounts of its switches as Markdown, for a paper, a notebook or an issue.

Works on the conversation's JSON (`Conversation.to_json()`), so no model and no torch is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workbench.words import lowest


def markdown(data: Mapping[str, Any]) -> str:
    """The conversation; what was said stands in block quotes, so it cannot become headings of the file.

    Args:
        data: JSON of a conversation.
    """
    lines = [f"# Conversation with the pair {inline(data['pair'])}", ""]
    if data.get("system"):
        lines += ["System prompt:", "", *quote(data["system"]), ""]
    told = []
    for message in data["messages"]:
        account = message.get("account")
        if account and account not in told:
            told.append(account)
            lines += [account_line(account), ""]
        if message["role"] == "assistant":
            who = f"{inline(message.get('model') or 'model')} ({message.get('side')}, {message.get('how')})"
        else:
            who = "You" if message["role"] == "user" else inline(message["role"])
        lines += [f"**{who}**", "", *quote(message["text"]), ""]
    last = data["accounts"][-1] if data["accounts"] else None
    if last and last not in told:
        lines += [account_line(last), ""]
    if data["accounts"]:
        lines += ["## Accounts of the switches", "", *account_table(data["accounts"]), ""]
    sampling = ", ".join(f"{name} {value}" for name, value in data["sampling"].items())
    lines += [f"Sampling: {inline(sampling)}. {len(data['token_ids']):,} tokens in all.", ""]
    return "\n".join(lines)


def account_line(account: Mapping[str, Any]) -> str:
    """One switch in a sentence."""
    text = (
        f"*Switched from {inline(account['source'])} to {inline(account['target'])} "
        f"({account['how']}): of {account['tokens']:,} tokens {account['reused']:,} were held, "
        f"{account['mapped']:,} mapped, {account['native']:,} run natively"
        + (f", {lowest(native)} too" if (native := account.get("native_layers")) else "")
        + f"; {account['ms'].get('total', 0.0):,.0f} ms"
    )
    if account.get("prefill_ms") is not None:
        text += f", against {account['prefill_ms']:,.0f} ms ({account['prefill_source']}) for a true prefill"
    return text + (f". Reason: {inline(account['reason'])}" if account.get("reason") else "") + ".*"


def account_table(accounts: list[Mapping[str, Any]]) -> list[str]:
    """All switches as a Markdown table."""
    head = ("to", "how", "tokens", "held", "mapped", "native", "ms", "prefill ms", "prefill is")
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for account in accounts:
        prefill = account.get("prefill_ms")
        cells = [
            inline(account["target"]), account["how"], f"{account['tokens']:,}", f"{account['reused']:,}",
            f"{account['mapped']:,}", f"{account['native']:,}", f"{account['ms'].get('total', 0.0):,.1f}",
            "–" if prefill is None else f"{prefill:,.1f}", account.get("prefill_source") or "–",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def inline(text: object) -> str:
    """Text within a line: characters that Markdown or HTML would interpret are escaped."""
    flat = " ".join(str(text).split())
    return re.sub(r"([\\`*_\[\]|<>#])", r"\\\1", flat)


def quote(text: str) -> list[str]:
    """Text as an indented code block inside a quotation, so that nothing in it is interpreted."""
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return [f">     {line}".rstrip() for line in (clean.splitlines() or [""])]
