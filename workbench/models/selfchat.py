"""Chats that a model writes with itself: the text on which its small sibling learns to talk.

All rows of a batch start together and every row gets exactly one token a step: a forced one (chat markup, a
prepared question) or a sampled one (an answer, or a question of the model's own). So all rows are always
equally long, nothing is padded or masked, and the preallocated KV cache is used up to the last token:

    system prompt (once) | user: forced or sampled | assistant: sampled | user … | cut at `length` tokens

Shapes: ids `(batch,)`, one step's logits `(batch, vocabulary)`, caches `(batch, kv_heads, length, head_dim)`
a layer.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from workbench.models.chat_questions import draw_question

Message = dict[str, str]


@dataclass(frozen=True)
class ChatOptions:
    """How chats are made. `length` counts all tokens of a chat, the system prompt included."""

    batch: int = 64
    length: int = 512
    top_k: int = 40
    temperature: float = 0.8
    user_temperature: float = 1.0
    own_question: float = 0.3
    answer_limit: int = 200
    question_limit: int = 40
    min_distinct: float = 0.6

    def __post_init__(self) -> None:
        if self.batch < 1 or self.length < 64 or self.top_k < 1:
            raise ValueError("batch and top_k must be at least 1 and length at least 64")


class Decoder:
    """A Llama forward pass, one token a row over a preallocated cache; norm gains are in the matrices."""

    def __init__(self, model: Any, batch: int, length: int, dtype: torch.dtype = torch.float32) -> None:
        config = model.config
        self.batch, self.length, self.dtype = batch, length, dtype
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.groups = config.num_attention_heads // self.kv_heads
        self.eps = config.rms_norm_eps
        self.embed = model.model.embed_tokens.weight.detach().to(dtype)
        self.head = (model.lm_head.weight.detach().float() * model.model.norm.weight.detach().float()).to(
            dtype
        )
        self.weights = []
        for layer in model.model.layers:
            a, m = layer.self_attn, layer.mlp
            g1, g2 = (
                layer.input_layernorm.weight.detach().float(),
                layer.post_attention_layernorm.weight.detach().float(),
            )
            qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).detach().float() * g1
            gate_up = torch.cat([m.gate_proj.weight, m.up_proj.weight]).detach().float() * g2
            tensors = (qkv, a.o_proj.weight.detach(), gate_up, m.down_proj.weight.detach())
            self.weights.append(tuple(t.to(dtype).contiguous() for t in tensors))
        positions = torch.arange(length)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1, length, 1), positions)
        self.cos, self.sin = cos[0].to(dtype), sin[0].to(dtype)
        shape = (batch, self.kv_heads, length, self.head_dim)
        self.cache = [
            (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in self.weights
        ]

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), None, self.eps)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Writes `position` of every row's cache; returns the next token's logits, (batch, vocabulary)."""
        x = self.embed[ids]
        cos, sin, half = self.cos[position], self.sin[position], self.head_dim // 2
        n_q, n_kv = self.groups * self.kv_heads, self.kv_heads
        for (qkv, out, gate_up, down), (keys, values) in zip(self.weights, self.cache, strict=True):
            h = F.linear(self._norm(x), qkv).view(self.batch, n_q + 2 * n_kv, self.head_dim)
            qk, v = h[:, : n_q + n_kv], h[:, n_q + n_kv :]
            qk = qk * cos + torch.cat((-qk[..., half:], qk[..., :half]), -1) * sin
            keys[:, :, position] = qk[:, n_q:]
            values[:, :, position] = v
            # The query heads of a group stand where queries usually do: one product serves all of them.
            q = qk[:, :n_q].reshape(self.batch, n_kv, self.groups, self.head_dim)
            mixed = F.scaled_dot_product_attention(
                q, keys[:, :, : position + 1], values[:, :, : position + 1]
            )
            x = x + F.linear(mixed.reshape(self.batch, -1), out)
            gate, up = F.linear(self._norm(x), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(self._norm(x), self.head)


@dataclass
class _Row:
    """One chat in the making: what is forced next, whose turn it is, what was said."""

    rng: random.Random
    topics: list[str]
    forced: list[int] = field(default_factory=list)
    role: str = "user"
    said: list[int] = field(default_factory=list)
    turns: list[tuple[str, list[int]]] = field(default_factory=list)
    sampling: bool = False

    def question(self) -> str:
        return draw_question(self.rng, self.topics, first=not self.turns)


class ChatWriter:
    """Writes batches of chats with one model.

    The same seed gives the same prepared questions and sampling stream.
    """

    def __init__(
        self, model: Any, tokenizer: Any, topics: list[str], options: ChatOptions, dtype: torch.dtype
    ) -> None:
        self.tokenizer, self.topics, self.options = tokenizer, topics, options
        self.decoder = Decoder(model, options.batch, options.length, dtype)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        self.system = tokenizer.encode(text[: text.index("<|im_start|>user")], add_special_tokens=False)
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.open_user = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False)
        self.open_assistant = tokenizer.encode("\n<|im_start|>assistant\n", add_special_tokens=False)
        self.newline = tokenizer.encode("\n", add_special_tokens=False)
        self.banned = [i for i in tokenizer.all_special_ids + list(range(17)) if i != self.end]
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.stops = {i for i, p in enumerate(pieces) if p and (p[-1] in ".!?" or "Ċ" in p)}
        for position, token in enumerate(
            self.system[:-1]
        ):  # these cache positions are never overwritten again
            self.decoder.step(torch.full((options.batch,), token), position)

    def _open_turn(self, row: _Row) -> None:
        """Queues the markup of the next user turn, and its text unless the model shall write it."""
        row.role, row.said = "user", []
        row.forced += ([] if not row.turns else self.newline) + self.open_user
        row.sampling = row.rng.random() < self.options.own_question
        if not row.sampling:
            row.said = self.tokenizer.encode(row.question(), add_special_tokens=False)
            row.forced += row.said
            self._close_turn(row)

    def _close_turn(self, row: _Row) -> None:
        """Books the turn that has ended; its `<|im_end|>` is forced, then the next turn is opened."""
        row.turns.append((row.role, row.said))
        row.forced.append(self.end)
        if row.role == "user":
            row.forced += self.open_assistant
            row.role, row.said, row.sampling = "assistant", [], True
        else:
            self._open_turn(row)

    def _take(self, row: _Row, token: int) -> None:
        """Books a sampled token and ends the turn at a stop id or, past the limit, at a sentence's end."""
        limit = self.options.answer_limit if row.role == "assistant" else self.options.question_limit
        if token == self.end:
            self._close_turn(row)
            row.forced.pop(0)  # the model wrote the stop id itself
            return
        row.said.append(token)
        if len(row.said) >= limit and (
            token in self.stops or row.role == "user" or len(row.said) >= 2 * limit
        ):
            self._close_turn(row)

    @torch.inference_mode()
    def batch(self, seed: int) -> list[dict[str, Any]]:
        """One batch without its degenerate chats: `{"messages": […], "cut": bool, "tokens": int}` each."""
        o = self.options
        generator = torch.Generator().manual_seed(seed)
        rows = [_Row(random.Random(seed * 1_000_003 + i), self.topics) for i in range(o.batch)]
        for row in rows:
            self._open_turn(row)
        ids = torch.full((o.batch,), self.system[-1])
        every: list[torch.Tensor] = []
        for position in range(len(self.system) - 1, o.length - 1):
            logits = self.decoder.step(ids, position).float()
            logits[:, self.banned] = -torch.inf
            hot = torch.tensor([o.temperature if r.role == "assistant" else o.user_temperature for r in rows])
            top, index = logits.topk(min(o.top_k, logits.shape[-1]), -1)
            pick = torch.multinomial((top / hot[:, None]).softmax(-1), 1, generator=generator)
            sampled = index.gather(1, pick)[:, 0].tolist()
            chosen = []
            for row, token in zip(rows, sampled, strict=True):
                if row.forced:
                    chosen.append(row.forced.pop(0))
                else:
                    chosen.append(token)
                    self._take(row, token)
            ids = torch.tensor(chosen)
            every.append(ids)
        tokens = torch.stack(every, 1)
        return [
            c
            for row, line in zip(rows, tokens, strict=True)
            if (c := self._finish(row, line.tolist())) is not None
        ]

    def _finish(self, row: _Row, tokens: list[int]) -> dict[str, Any] | None:
        cut = row.role == "assistant" and bool(row.said) and row.sampling
        turns = row.turns + ([(row.role, row.said)] if cut else [])
        while turns and turns[-1][0] == "user":
            turns.pop()
        messages = [{"role": r, "content": self.tokenizer.decode(s)} for r, s in turns]
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        if (
            not messages
            or not all(m["content"].strip() for m in messages)
            or len(set(grams)) < self.options.min_distinct * len(grams)
        ):
            return None
        return {
            "messages": messages,
            "cut": cut,
            "tokens": sum(len(s) + 5 for _, s in turns) + len(self.system),
        }


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file so that a kill leaves either the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_chats(writer: ChatWriter, folder: Path, tokens: int, seed: int) -> Iterator[tuple[int, int]]:
    """Writes `part-NNNN.jsonl` files until there are `tokens` tokens; yields (tokens so far, chats so far).

    Parts that exist are kept, and every part has a seed of its own: a killed run goes on where it was.
    """
    total = chats = number = 0
    while total < tokens:
        part = folder / f"part-{number:04d}.jsonl"
        if not part.exists():
            made = writer.batch(seed + number)
            write_atomically(part, "".join(json.dumps(c, ensure_ascii=False) + "\n" for c in made))
        lines = read_chats(part)
        total, chats, number = total + sum(c["tokens"] for c in lines), chats + len(lines), number + 1
        yield total, chats


def read_chats(path: Path) -> list[dict[str, Any]]:
    """The chats of a JSONL file, or of all parts in a folder in their order."""
    files = sorted(path.glob("part-*.jsonl")) if path.is_dir() else [path]
    return [
        json.loads(line) for f in files for line in f.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


def render(tokenizer: Any, chat: dict[str, Any]) -> str:
    """A chat as the template writes it; one that was cut in mid-answer stays open."""
    text = tokenizer.apply_chat_template(chat["messages"], tokenize=False)
    return text.removesuffix("<|im_end|>\n") if chat.get("cut") else text
