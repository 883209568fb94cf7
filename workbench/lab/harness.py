"""lm-evaluation-harness on a mapped cache: one model class, one arm at a time.

    request's context ─▶ source reads it ─▶ handed over (the arm's cache) ─▶ the target runs the continuation natively

Importing this module needs `pip install -r requirements-eval.txt`. The class is registered as "kv-handoff", so that
the harness's own command line can use it too:

    lm_eval --model kv-handoff --model_args pair=embedded,direction=up,arm=mapped --tasks arc_challenge
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from workbench.chat.decode import Sampling, decode, plain_text
from workbench.kv.forward import forward
from workbench.lab.arms import ArmCaches
from workbench.lab.provenance import models_of
from workbench.lab.rows import Plan, Span
from workbench.models.catalog import resolve
from workbench.models.pair import PairHost

ROLLING = 1024  # tokens of a window of running text; half of them are context


@register_model("kv-handoff")
class MappedCacheLM(TemplateLM):
    """One arm of a pair as a model of the harness."""

    def __init__(
        self,
        pair: str | PairHost = "embedded",
        direction: str = "up",
        arm: str = "mapped",
        anchors: int | None = None,
        hold_back: int | None = None,
        source: str | None = None,
        target: str | None = None,
        dtype: str = "auto",
        device_map: str = "auto",
        **_: Any,
    ) -> None:
        """Args: pair: a name of the catalog or a host; arm: of `ArmCaches`; the rest as for the command line."""
        super().__init__()
        if isinstance(pair, PairHost):
            host = pair
        else:
            host = PairHost(resolve(None if source else pair, source, target, direction), device_map, dtype)
        self.host, self.direction, self.arm = host, direction, arm
        models = models_of(host, direction)
        mapper, _manifest = host.mapper(direction)
        self._caches = ArmCaches(*models, mapper, _whole(anchors), _whole(hold_back))
        self.speaker = models[0] if arm == "source" else models[1]
        self.tokenizer = models[1].tokenizer
        self.max_length = host.max_positions()
        self._other: tuple[Sequence[int], Any] | None = None

    @property
    def eot_token_id(self) -> int:
        """What an empty context is replaced by."""
        token = self.tokenizer.eos_token_id
        return int(token if token is not None else 0)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's request cache."""
        return self.speaker.identity.tokenizer

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids as the pair's tokenizer makes them."""
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return [int(i) for i in self.tokenizer(string, verbose=False, **special)["input_ids"]]

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether all tokens were the likeliest) of every request, in order.

        Requests of one context are scored together over one handoff.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            room = self.max_length - len(continuation)
            groups.setdefault(tuple(context[-room:]) or (self.eot_token_id,), []).append(index)
        found: list[tuple[float, bool] | None] = [None] * len(requests)
        for context, members in groups.items():
            spans = [Span(tuple(requests[index][2])) for index in members]
            with self.host.holding_lane():
                model, cache = self._cache(context)
                scored = Plan(context[-1], spans).run(model, cache)
            for index, one in zip(members, scored, strict=True):
                found[index] = (float(one.log_p.sum()), bool(one.hit.all()))
        return [answer for answer in found if answer is not None]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts: windows whose first half is context and is handed over."""
        totals = []
        window = min(ROLLING, self.max_length)
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.eot_token_id, window, context_len=window // 2
            )
            pieces = [("", *make_disjoint_window(pair)) for pair in windows]
            asked = [(("", ""), list(context), list(rest)) for _, context, rest in pieces]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(asked)))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers up to a stop string."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        most = int(options.get("max_gen_toks", 256))
        ids = tuple(self.tok_encode(context)[-(self.max_length - most) :]) or (self.eot_token_id,)
        with self.host.holding_lane():
            model, cache = self._cache(ids)
            logits = forward(model.model, [ids[-1]], cache)
            assert logits is not None
            answer: list[int] = []
            for token in decode(model, logits, cache, Sampling(greedy=True, max_new_tokens=most)):
                if token in model.stop_ids:
                    break
                answer.append(token)
                text = plain_text(self.tokenizer, answer)
                if any(stop and stop in text for stop in stops):
                    break
        text = plain_text(self.tokenizer, answer)
        for stop in stops:
            text = text.split(stop)[0] if stop else text
        return text

    def _cache(self, context: Sequence[int]) -> tuple[Any, Any]:
        """The arm's model and cache of a context, without its last token."""
        needs_own = self.arm in ("mapped", "recipe", "identity", "source", "wrong_document")
        own = self._caches.read(context) if needs_own else None
        kept = own
        if (
            self.arm == "wrong_document" and self._other is None
        ):  # the first text has no other: its own, reversed
            back = tuple(reversed(context))
            self._other = (back, self._caches.read(back))
        wrong_ids, wrong = self._other or ((), None)
        model, cache = self._caches.make(self.arm, context, own, wrong_ids, wrong)
        if self.arm == "wrong_document":
            self._other = (context, kept)
        return model, cache


def _whole(value: int | str | None) -> int | None:
    return None if value is None else int(value)


def accuracies(results: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(task, metric, value) of the harness's results, the main metric of each task first chosen."""
    for task, metrics in results["results"].items():
        for wanted in ("acc_norm", "acc", "exact_match", "word_perplexity"):
            found = [(key, value) for key, value in metrics.items() if key.split(",")[0] == wanted]
            if found:
                key, value = found[0]
                yield task, key.split(",")[0], float(value)
                break
