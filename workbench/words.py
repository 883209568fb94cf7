"""Every term of the field that a screen, a report or a document uses, in plain words. The only place for them.

`docs/method.md` has the formulas; the names there, here and in the results are the same.
"""

from __future__ import annotations

TERMS: dict[str, str] = {
    "uncertainty": "Mean entropy of the model's own next-token distributions over its answer, in nats. 0: sure.",
    "chance": "The accuracy of guessing.",
    "KV cache": "What a model remembers of the text: a key and a value vector per token, layer and head.",
    "key": "The vector by which a later token finds this one. It is rotated by the token's position.",
    "value": "The vector that a later token reads once it has found this one.",
    "head": "One of several small attention units of a layer; each looks for something else in the text.",
    "KV head": "A head that stores keys and values. Several query heads may share one.",
    "query head": "A head that looks things up. It shares its keys and values with the others of its group.",
    "layer": "One of the model's stacked steps. Each keeps a part of the KV cache.",
    "token": "A piece of text, a word or part of one; models read and write tokens.",
    "prefill": "Reading the whole text once to fill the KV cache, before the first new token can be written.",
    "handoff": "Letting another model carry on: everything from the click until it can write.",
    "mapper": "One matrix per layer that turns one model's KV cache into an estimate of the other's.",
    "mapped": "Computed from the other model's KV cache by a linear map per layer, not by reading the text.",
    "native": "Computed by the model itself, exactly.",
    "source": "The model whose KV cache is read: the one that spoke before the switch.",
    "target": "The model that takes over.",
    "fallback": "Mapping was not possible, so the target read everything again. It is always shown.",
    "anchor": "One of the first few tokens. All later ones attend to them, so the target runs them itself.",
    "anchors": "The first few tokens. All later ones attend to them, so the target runs them itself.",
    "re-read": "Rare tokens (names, numbers) are what mapping loses first: the target runs them itself, over the rest.",
    "native layers": "Lowest layers that the target runs itself over the whole text: exact, as nothing above is needed.",
    "hold-back": "The last few tokens. The target model runs them itself, on top of the mapped ones.",
    "RoPE": "How a key says where its token stands: it is rotated by an angle that grows with the position.",
    "ridge": "Least squares with a small penalty on large weights; it has one exact solution.",
    "R²": "Share of the variance that the map explains. 1 is perfect, 0 no better than the mean.",
    "cosine": "Angle between a head's output on true and on mapped caches. 1 means the same direction.",
    "attention-output cosine": "Angle between what a head reads from the true cache and from the mapped one. "
    "1 means the same direction.",
    "KL": "How far the next-token probabilities are from those on the true cache, in nats. 0: the same.",
    "nats": "Unit of information: one nat is the surprise at something with probability 1/e.",
    "top-1": "Share of positions at which both caches give the same most likely next token.",
    "CE": "Cross-entropy: mean surprise at the true next token, in nats. Lower is better.",
    "gap recovered": "How much of the benefit of having the context survives the mapping. 1 is all of it.",
    "retention": "Accuracy on the mapped cache as a share of the accuracy on the true one.",
    "retention floor": "Retention with what guessing would reach taken off both sides.",
    "correlation": "How closely two figures go together, here over mappers: 1 or -1 wholly, 0 not at all.",
    "rank correlation": "The same for the order alone, so that a few very bad mappers cannot decide it.",
    "mapper variant": "A mapper fitted with other settings, or spoilt with noise on purpose, to compare good ones and bad.",
    "drift": "How the error grows when a conversation is handed over again and again.",
    "held out": "Text that the mapper was not fitted on.",
    "p/n": "Parameters per output over calibration tokens. Above 0.2 the fit may overfit.",
    "gate": "The model's own cache, sent through the handoff code, must give its own logits back.",
    "control": "A condition in which the mapping can carry nothing. A result counts only if it beats these.",
    "net saving": "Time of a true prefill minus the time of the whole handoff.",
    "break-even": "The context length from which a handoff is faster than reading everything again.",
    "patch gain": "How much closer the output comes when only this head gets its true keys and values back.",
}
"""Term -> one plain sentence or two."""

ARROWS = {"up": "small → large", "down": "large → small"}
"""The two directions, as they stand on screens and in reports."""


def lowest(layers: int) -> str:
    """So many lowest layers, in words."""
    return "the lowest layer" if layers == 1 else f"the lowest {layers} layers"
