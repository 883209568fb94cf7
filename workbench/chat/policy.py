"""Map or prefill? The decision that a router makes before a switch, and why.

    context length, break-even, approval -> "map" | "prefill", in one sentence

Below the break-even a true prefill is as quick and exact, so nothing is gained by mapping. A pair that a policy
refuses, or that has no record where the policy asks for one, is served by a true prefill, and the account says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.approval import ACCEPT, REFUSE, WARN, Approval, Policy, check, load_approval

if TYPE_CHECKING:
    from workbench.models.pair import PairHost

MAP, PREFILL = "map", "prefill"


@dataclass(frozen=True)
class Verdict:
    """What to do at a switch.

    Attributes:
        how: "map" or "prefill".
        reason: one sentence.
        warning: what a person should know although it is mapped, or "".
    """

    how: str
    reason: str
    warning: str = ""


def decide(context_tokens: int, break_even: int | None, approval: Approval | None) -> str:
    """What a router should do with a conversation that changes models: "map" or "prefill".

    Args:
        context_tokens: that the target does not hold yet.
        break_even: from how many tokens on mapping is quicker than a prefill, None when never measured.
        approval: the record of exactly this pair, direction and mapper; None when there is none.
    """
    return verdict(context_tokens, break_even, approval).how


def verdict(
    context_tokens: int,
    break_even: int | None,
    approval: Approval | None,
    policy: Policy | None = None,
    why: str = "",
) -> Verdict:
    """The same with the reason.

    Args:
        context_tokens: that the target does not hold yet.
        break_even: in tokens, None when never measured (then length alone decides nothing).
        approval: the record, None when there is none.
        policy: says what to do without a record, None: prefill.
        why: why there is no record.
    """
    if approval is None:
        without = policy.without_record if policy is not None else REFUSE
        sentence = why or "There is no approval record for this pair."
        if without == REFUSE:
            return Verdict(PREFILL, f"{sentence} So the context is read again.")
    else:
        without = ""
        sentence = approval.sentence()
        if policy is not None:  # the figures are held against the policy in force, not the one of their day
            missed = [entry for entry in check(policy, approval.figures) if not entry.ok]
            decision = policy.when_missed if missed else ACCEPT
            if missed:
                names = ", ".join(entry.name.replace("_", " ") for entry in missed)
                sentence = f"The policy {policy.name!r} is not met ({names})."
        else:
            decision = approval.decision
        if decision == REFUSE:
            return Verdict(PREFILL, f"{sentence} So the context is read again.")
        without = WARN if decision == WARN else ""
    if break_even is not None and context_tokens < break_even:
        return Verdict(
            PREFILL,
            f"{context_tokens:,} tokens are below the break-even of {break_even:,}: reading is as quick.",
        )
    return Verdict(MAP, "Mapping is quicker than reading the context.", sentence if without == WARN else "")


def judge(host: PairHost, direction: str, policy: Policy | None, context_tokens: int) -> Verdict:
    """The verdict on a switch under a policy; without a policy everything is mapped, as a person asked for it.

    The break-even is no ground to refuse what a person asked for: it is left to routers.
    """
    if policy is None:
        return Verdict(MAP, "No policy is in force.")
    record, why = load_approval(host.mapper_folder(direction))
    return verdict(context_tokens, None, record, policy, why)
