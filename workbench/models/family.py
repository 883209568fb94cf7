"""The recipe of the small sibling, in four stages that each resume after a kill.

    chats    the large model writes chats with itself                 -> chats.jsonl, chats-heldout.jsonl
    layers   what to keep: drop the cheapest layer, again and again   -> layers.json
    distil   heal what is left on half text, half chats               -> state.safetensors, distil.jsonl
    pack     the difference to the large model in a few bits a weight -> sibling.safetensors, sibling.json

Stages read and write one folder (`home()/family` unless told otherwise); only `pack` writes to `--out`.
Losses are next-token cross-entropy in nats on held-out documents and held-out chats that no stage before them
has seen.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from workbench.errors import InputError
from workbench.models import embedded, packing
from workbench.models.chat_questions import load_topics
from workbench.models.devices import choose_dtype
from workbench.models.distil import (
    Block,
    Distiller,
    DistilOptions,
    cross_entropy,
    stack,
)
from workbench.models.prune import choose_layers, new_student
from workbench.models.refit import refit_down_projections
from workbench.models.selfchat import (
    ChatOptions,
    ChatWriter,
    read_chats,
    render,
    write_atomically,
    write_chats,
)

Progress = Callable[[float, str], None]
STAGES = ("chats", "layers", "distil", "pack")
KEPT_LAYERS = 20
TEXTS = Path(__file__).resolve().parents[2] / "assets" / "text"
RATES = (1e-4, 2e-4)


@dataclass(frozen=True)
class FamilyOptions:
    """What to build.

    `tokens` is the distillation's whole plan; a resumed run with another plan reshapes the decay.
    """

    out: Path = field(default_factory=lambda: embedded.home() / "family" / "packed")
    tokens: int = 500_000
    stage: str = "all"
    resume: bool = False
    work: Path = field(default_factory=lambda: embedded.home() / "family")
    texts: Path = TEXTS
    model: Path | None = None
    kept: int = KEPT_LAYERS
    rate: float | None = None
    trial_tokens: int = 12_000
    chat_tokens: int = 320_000
    held_chat_tokens: int = 27_000
    chats: ChatOptions = field(default_factory=lambda: ChatOptions(batch=128))
    length: int = 512
    held_blocks: int = 16
    pack_blocks: int = 8
    refit_blocks: int = 12
    evaluate_every: int = 50_000
    seed: int = 1000
    average: bool | None = None
    bits: tuple[int, ...] = (2, 3, 4)
    start: Path | None = None

    def __post_init__(self) -> None:
        if self.stage not in (*STAGES, "all"):
            raise InputError(f"--stage must be one of {', '.join(STAGES)} or all, not {self.stage!r}.")
        if not all(1 <= b <= 8 for b in self.bits):
            raise InputError("--bits must be from 1 to 8.")
        if self.tokens < 1 or self.kept < 1:
            raise InputError("--tokens and the number of kept layers must be at least 1.")


@dataclass(frozen=True)
class Material:
    """Both models' common ground: the large model in the compute type, its tokenizer, its folder."""

    path: Path
    model: Any
    tokenizer: Any


def run(options: FamilyOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Runs the stages.

    Returns:
        `out`, `ce: {large: {text, chat}, small: {text, chat}}`, and what each stage found.

    Raises:
        InputError: a stage's input is missing.
        ModelUnavailableError: the large model cannot be had.
    """
    report = progress or (lambda share, text: None)
    path = options.model or embedded.ensure("large", report)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    material = Material(path, model, AutoTokenizer.from_pretrained(path, local_files_only=True))
    stages = STAGES if options.stage == "all" else (options.stage,)
    found: dict[str, Any] = {"out": str(options.out)}
    for stage in stages:
        if not options.resume:
            _forget(stage, options)
        report(0.0, f"stage {stage}")
        found.update(
            {"chats": stage_chats, "layers": stage_layers, "distil": stage_distil, "pack": stage_pack}[stage](
                options, material, report
            )
        )
    return found


def _forget(stage: str, options: FamilyOptions) -> None:
    """Without `--resume` a stage starts over. Shipped chats stay: they are an input like the texts."""
    files = {
        "layers": ["layers.json"],
        "distil": ["refitted.safetensors", "rate.json", "state.safetensors", "distil.jsonl"],
    }
    for name in files.get(stage, []):
        (options.work / name).unlink(missing_ok=True)
    if stage == "chats" and options.stage == "chats":
        for name in ("chats", "chats-heldout"):
            shutil.rmtree(options.work / name, ignore_errors=True)


# ---------------------------------------------------------------------------------------------- material


def read_documents(folder: Path) -> list[str]:
    """All documents of a folder's `.txt` files in the files' order; a line `%%` separates two."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise InputError(f"There are no .txt files in {folder}.")
    return [d.strip() for f in files for d in f.read_text(encoding="utf-8").split("\n%%\n") if d.strip()]


def text_blocks(tokenizer: Any, documents: Sequence[str], length: int) -> list[Block]:
    """Every document cut into blocks of `length` tokens; a rest under half a block is left out."""
    blocks = []
    for document in documents:
        ids = torch.tensor(tokenizer.encode(document, add_special_tokens=False, verbose=False))
        blocks += [Block(part) for part in ids.split(length) if len(part) >= max(length // 2, 2)]
    return blocks


def chat_blocks(tokenizer: Any, chats: Sequence[dict[str, Any]], length: int) -> list[Block]:
    """One block a chat; the system prompt, the same in all of them, does not count."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    skip = len(tokenizer.encode(text[: text.index("<|im_start|>user")], add_special_tokens=False))
    ids = [
        torch.tensor(tokenizer.encode(render(tokenizer, c), add_special_tokens=False)[:length]) for c in chats
    ]
    return [Block(i, skip) for i in ids if len(i) > skip + 2]


def held_out(options: FamilyOptions, tokenizer: Any, count: int) -> dict[str, list[Block]]:
    """`count` held-out blocks of text, the same number of each file, and `count` held-out chats."""
    files = sorted((options.texts / "heldout").glob("*.txt"))
    texts: list[Block] = []
    for file in files:
        documents = [d for d in file.read_text(encoding="utf-8").split("\n%%\n") if d.strip()]
        heads = [b for d in documents for b in text_blocks(tokenizer, [d], options.length)[:2]]
        texts += heads[: -(-count // len(files))]
    chats = chat_blocks(tokenizer, _chats(options, "chats-heldout"), options.length)
    if not texts or not chats:
        raise InputError(f"There are no held-out texts or chats in {options.texts}.")
    return {"text": texts, "chat": chats[:count]}


def _chats(options: FamilyOptions, name: str) -> list[dict[str, Any]]:
    """Chats from the assets, else the parts that the running `chats` stage has written so far."""
    file, parts = options.texts / f"{name}.jsonl", options.work / name
    if file.exists():
        return read_chats(file)
    if parts.is_dir():
        return read_chats(parts)
    raise InputError(f"{file} is missing; run the stage `chats` first.")


# ------------------------------------------------------------------------------------------------- chats


def stage_chats(options: FamilyOptions, material: Material, report: Progress) -> dict[str, Any]:
    """Generates the training and the held-out chats, unless the assets have enough of them already."""
    topics, held_topics = load_topics(options.texts / "topics.txt")
    jobs = (
        ("chats-heldout", held_topics, options.held_chat_tokens, options.seed + 776_000, 64),
        ("chats", topics, options.chat_tokens, options.seed, options.chats.batch),
    )
    counts = {}
    for name, about, tokens, seed, batch in jobs:
        file = options.texts / f"{name}.jsonl"
        if not file.exists() or sum(c["tokens"] for c in read_chats(file)) < tokens:
            settings = replace(options.chats, batch=min(batch, options.chats.batch))
            writer = ChatWriter(
                material.model, material.tokenizer, about, settings, choose_dtype(torch.device("cpu"))[0]
            )
            for total, chats in write_chats(writer, options.work / name, tokens, seed):
                report(min(1.0, total / tokens), f"{name}: {chats} chats, {total} tokens")
            made = read_chats(options.work / name)
            write_atomically(file, "".join(json.dumps(c, ensure_ascii=False) + "\n" for c in made))
        counts[name] = sum(c["tokens"] for c in read_chats(file))
    _write_calibration(options, material.tokenizer)
    return {"chat_tokens": counts}


def _write_calibration(options: FamilyOptions, tokenizer: Any, size: int = 80_000) -> None:
    """The first training chats as template text, for those who fit mappers."""
    texts: list[str] = []
    for chat in read_chats(options.texts / "chats.jsonl"):
        if sum(map(len, texts)) < size:
            texts.append(render(tokenizer, chat).strip())
    write_atomically(options.texts / "calibration" / "chats.txt", "\n%%\n".join(texts) + "\n")


# ------------------------------------------------------------------------------------------------ layers


def stage_layers(options: FamilyOptions, material: Material, report: Progress) -> dict[str, Any]:
    """Chooses the kept layers on training material and stores them in `layers.json`."""
    file = options.work / "layers.json"
    if not file.exists():
        texts = text_blocks(material.tokenizer, read_documents(options.texts / "train")[::40], 256)[:2]
        chats = chat_blocks(material.tokenizer, _chats(options, "chats")[:2], 256)
        kept, losses = choose_layers(material.model, stack([*texts, *chats]), options.kept, report)
        write_atomically(file, json.dumps({"kept_layers": kept, "losses": losses}))
    return dict(json.loads(file.read_text(encoding="utf-8")))


# ------------------------------------------------------------------------------------------------ distil


def first_student(
    options: FamilyOptions,
    material: Material,
    kept: list[int],
    pools: tuple[list[Block], list[Block]],
    report: Progress,
) -> Any:
    """Where the distillation starts.

    A packed sibling where `start` names its folder, else the kept layers with `down_proj` refitted in closed form, done
    once.
    """
    file, student = options.work / "refitted.safetensors", new_student(material.path, material.model, kept)
    if options.start:
        student.load_state_dict(_packed(options.start, material), strict=False)
        return student
    if not file.exists():
        ids, counts = stack([b for pool in pools for b in pool[:: max(1, len(pool) // options.refit_blocks)]])
        use = F.pad(counts, (0, 1), value=False)
        refit_down_projections(material.model, student, kept, ids, use, progress=report)
        names = [n for n in student.state_dict() if n.endswith("down_proj.weight")]
        save_file({n: student.state_dict()[n] for n in names}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)
    student.load_state_dict(load_file(file), strict=False)
    return student


def stage_distil(options: FamilyOptions, material: Material, report: Progress) -> dict[str, Any]:
    """Trains up to the plan; stops early, with its state saved, on SIGTERM."""
    kept = list(_layers(options)["kept_layers"])
    texts = text_blocks(material.tokenizer, read_documents(options.texts / "train"), options.length)
    chats = chat_blocks(material.tokenizer, _chats(options, "chats"), options.length)
    held = held_out(options, material.tokenizer, options.held_blocks)
    plan = DistilOptions(tokens=options.tokens, seed=options.seed, evaluate_every=options.evaluate_every)
    plan = replace(
        plan, rate=options.rate or _try_rates(options, material, kept, (texts, chats), plan, report)
    )
    student = first_student(options, material, kept, (texts, chats), report)
    job = Distiller(material.model, student, texts, chats, plan, options.work)
    job.load()
    large = _large_losses(options, material, held)
    if job.step == 0:
        small = {name: cross_entropy(job.student, blocks) for name, blocks in held.items()}
        job.log(tokens=0, ce={"large": large, "small": small})
        report(0.0, f"before training: small {small}, large {large}")

    def stop(*_: Any) -> None:
        job.stopping = True

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: nobody sends us signals
        previous = None
    try:
        job.run(held, large, report)
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
    small = {name: cross_entropy(job.student, blocks) for name, blocks in held.items()}
    return {"ce": {"large": large, "small": small}, "tokens": job.tokens, "rate": plan.rate}


def _large_losses(
    options: FamilyOptions, material: Material, held: dict[str, list[Block]]
) -> dict[str, float]:
    """The large model's held-out losses, measured once: it does not change."""
    file = options.work / f"large-{options.held_blocks}.json"
    if not file.exists():
        losses = {name: cross_entropy(material.model, blocks) for name, blocks in held.items()}
        write_atomically(file, json.dumps(losses))
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _packed(folder: Path, material: Material) -> dict[str, torch.Tensor]:
    """Weights of a packed sibling: `sibling.safetensors` and `sibling.json` of `folder` over the large model."""
    manifest = json.loads((folder / "sibling.json").read_text(encoding="utf-8"))
    return embedded.sibling_weights(material.path, folder / "sibling.safetensors", manifest)


def _layers(options: FamilyOptions) -> dict[str, Any]:
    if options.start:
        return dict(json.loads((options.start / "sibling.json").read_text(encoding="utf-8")))
    file = options.work / "layers.json"
    if not file.exists():
        raise InputError(f"{file} is missing; run the stage `layers` first.")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _try_rates(
    options: FamilyOptions,
    material: Material,
    kept: list[int],
    pools: tuple[list[Block], list[Block]],
    plan: DistilOptions,
    report: Progress,
) -> float:
    """Trains briefly at every rate of `RATES` on the same blocks; the best one's state starts the run."""
    file = options.work / "rate.json"
    if file.exists():
        return float(json.loads(file.read_text(encoding="utf-8"))["rate"])
    held = held_out(options, material.tokenizer, 4)
    results: dict[float, float] = {}
    for rate in RATES:
        trial = Distiller(
            material.model,
            first_student(options, material, kept, pools, report),
            *pools,
            replace(plan, rate=rate),
            options.work / f"trial-{rate:g}",
        )
        while trial.tokens < min(options.trial_tokens, plan.tokens):
            trial.train_step()
        results[rate] = sum(cross_entropy(trial.student, blocks) for blocks in held.values())
        trial.save()
        report(0.0, f"rate {rate:g}: held-out sum {results[rate]:.3f} after {trial.tokens} tokens")
    best = min(results, key=lambda r: results[r])
    (options.work / f"trial-{best:g}" / "state.safetensors").replace(options.work / "state.safetensors")
    for rate in RATES:
        shutil.rmtree(options.work / f"trial-{rate:g}", ignore_errors=True)
    write_atomically(
        file, json.dumps({"rate": best, "held_out_sums": {f"{r:g}": v for r, v in results.items()}})
    )
    return best


# -------------------------------------------------------------------------------------------------- pack


def stage_pack(options: FamilyOptions, material: Material, report: Progress) -> dict[str, Any]:
    """Measures every way to ship the difference and writes the smallest that loses almost nothing."""
    kept = list(_layers(options)["kept_layers"])
    held = held_out(options, material.tokenizer, options.pack_blocks)
    train = text_blocks(material.tokenizer, read_documents(options.texts / "train")[::20], options.length)[:8]
    train += chat_blocks(material.tokenizer, _chats(options, "chats")[:8], options.length)
    return packing.pack(
        packing.PackOptions(
            options.out, options.work / "state.safetensors", kept, options.average, bits=options.bits
        ),
        material.model,
        new_student(material.path, material.model, kept),
        load_file(material.path / "model.safetensors"),
        train,
        held,
        report,
    )
