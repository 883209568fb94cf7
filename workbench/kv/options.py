"""How to fit and what a fit found: options that check themselves, the report, and the pieces of text that are read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import InputError
from workbench.kv.gather import PARTS_EVERY
from workbench.kv.mapper import FEATURES

SHORTEST_SEQUENCE = 32
P_OVER_N_WARNING = 0.2
SELECTIONS, OBJECTIVES = ("ranked", "greedy"), ("plain", "attention")


@dataclass(frozen=True)
class FitOptions:
    """How to fit. `top_k` and `ridge` of None mean: chosen by held-out error, per target layer in the full form.

    Attributes:
        sequences: how many pieces of text to read.
        length: tokens a piece.
        stride: use every `stride`-th token of a piece.
        top_k: source layers a target layer, at most all. In the low-rank form all target layers read the same ones.
        ridge: strength, relative to the mean variance of the features.
        anchors: first tokens that are left out, and later run natively.
        hold_back: recommended number of last tokens to run natively.
        seed: of the choice of pieces.
        selection: how source layers are put in order: "ranked" (each alone) or "greedy" (what each adds).
        objective: "plain", or "attention": errors count as the target's attention notices them.
        features: "own": keys from keys, values from values; "both": each from keys and values.
        rank: coordinates of the low-rank form (for keys and for values each with own features); 0: the full form.
        mlp: width of two hidden layers that add nonlinear coordinates, 0 for none; needs rank and both features.
        polish: steps of gradient descent on the target's own KL after the closed form.
        reread: share of the tokens that the target should run natively at a switch, the rarest ids of the text; 0: none.
        native_layers: so many of the lowest target layers run natively at a switch; they are fitted like the others.
    """

    sequences: int = 96
    length: int = 512
    stride: int = 1
    top_k: int | None = 4
    ridge: float | None = 0.01
    anchors: int = 4
    hold_back: int = 16
    seed: int = 0
    selection: str = "ranked"
    objective: str = "attention"
    features: str = "own"
    rank: int = 0
    mlp: int = 0
    polish: int = 0
    reread: float = 0.15
    native_layers: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be fitted.

        Raises:
            InputError: naming the option.
        """
        if self.sequences < PARTS_EVERY:
            raise InputError(f"At least {PARTS_EVERY} sequences are needed, {self.sequences} were asked for.")
        if self.length < SHORTEST_SEQUENCE:
            raise InputError(f"A sequence must have at least {SHORTEST_SEQUENCE} tokens, not {self.length}.")
        if not 1 <= self.stride < self.length - self.anchors or not 0 <= self.anchors < self.length:
            raise InputError("The stride and the anchors must leave tokens of each sequence to fit on.")
        if self.top_k is not None and self.top_k < 1:
            raise InputError("At least one source layer is needed (top_k 1 or more).")
        if self.ridge is not None and not 0 < self.ridge < 1e6:
            raise InputError("The ridge must be a number above 0.")
        if not 0 <= self.reread < 1:
            raise InputError("The share of tokens to re-read must be at least 0 and below 1.")
        if self.hold_back < 1:
            raise InputError("At least the last token must be held back (hold_back 1 or more).")
        for name, known in (("selection", SELECTIONS), ("objective", OBJECTIVES), ("features", FEATURES)):
            if getattr(self, name) not in known:
                raise InputError(
                    f"The {name} must be one of: {', '.join(known)}; not {getattr(self, name)!r}."
                )
        if min(self.rank, self.mlp, self.polish, self.native_layers) < 0:
            raise InputError("Rank, MLP width, polish steps and native layers cannot be below 0.")
        if self.rank and self.top_k is None:
            raise InputError("The low-rank form needs a number of source layers (top_k), or all.")
        if self.mlp and not (self.rank and self.features == "both"):
            raise InputError(
                "An MLP adds to a low-rank map that reads keys and values.", "Set a rank and both features."
            )


@dataclass(frozen=True)
class FitReport:
    """What a fit found.

    R² is averaged over layers and heads, on tokens that neither fitted nor chose anything (`heldout_tokens` of them);
    `r2_*_by_head` is [layer][head]. Of what was fitted on, `chosen_tokens` were first used to choose source layers and
    ridge. `mlp` compares with and without the hidden layers; `polish_kl` and `polish_quotes_kl` are the KL on held-out
    pieces, of plain text and of quotes, at the start of the polish, at every look, and last of the state that was kept.
    """

    tokens: int
    heldout_tokens: int
    features: int
    p_over_n: float
    seconds: dict[str, float]
    r2_k: float
    r2_v: float
    r2_k_by_head: list[list[float]]
    r2_v_by_head: list[list[float]]
    peak_rss_mb: float
    chosen_tokens: int = 0
    parameters: int = 0
    flops_per_token: int = 0
    mlp: dict[str, float] | None = None
    polish_kl: tuple[float, ...] = ()
    polish_quotes_kl: tuple[float, ...] = ()
    reread_share: float = 0.0

    @property
    def warning(self) -> str:
        """A sentence when there were too few tokens for so many features, else ""."""
        if self.p_over_n <= P_OVER_N_WARNING:
            return ""
        return (
            f"{self.features} parameters per output were fitted on only {self.tokens} tokens "
            f"(p/n = {self.p_over_n:.2f}, above {P_OVER_N_WARNING}): use more text or fewer source layers."
        )


def cut_sequences(tokenizer: Any, texts: Sequence[str], options: FitOptions) -> list[list[int]]:
    """Cut documents into pieces of `options.length` tokens and pick `options.sequences` of them, spread by a seed.

    Raises:
        InputError: when the texts have too few tokens.
    """
    pieces = cut_pieces(tokenizer, texts, options)
    if len(pieces) < PARTS_EVERY:
        raise InputError(
            f"The calibration text gives only {len(pieces)} pieces of {options.length} tokens, at least "
            f"{PARTS_EVERY} are needed.",
            "Give more or longer text, or a smaller length.",
        )
    # Full pieces first: a document's short last piece would waste the budget.
    order = random.Random(options.seed)
    order.shuffle(pieces)
    pieces.sort(key=len, reverse=True)
    pieces = pieces[: options.sequences]
    order.shuffle(pieces)
    return pieces


def cut_pieces(tokenizer: Any, texts: Sequence[str], options: FitOptions) -> list[list[int]]:
    """All pieces of `options.length` tokens, a document's last one shorter, in the order of the texts.

    Every piece starts as a context does, with the start token where the tokenizer adds one.
    """
    pieces: list[list[int]] = []
    first = list(tokenizer("")["input_ids"])
    step = options.length - len(first)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for start in range(0, len(ids), step):
            piece = first + ids[start : start + step]
            if len(piece) >= max(SHORTEST_SEQUENCE, options.anchors + options.stride + 1):
                pieces.append(piece)
    return pieces
