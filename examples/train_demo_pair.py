"""Train the bundled demo pair: a small code model, and a draft model that imitates it.

    pip install -e '.[train]'
    python examples/train_demo_pair.py --work build/demo-pair --out runtime/demo_pair

The corpus is the source of the Python standard library of the running interpreter (PSF licence).
One file in twenty, chosen by a hash of its path, is held out of all training: tokenizer, target and
draft. `examples/measure_acceptance.py` takes its prompts from there.

There are four stages. Each writes a file, and is skipped if that file exists. The two long ones
write a checkpoint every `CHECKPOINT_EVERY` steps and resume from it, so a run may be stopped at any
time:

1. *tokenizer*: byte-level BPE, `VOCAB_SIZE` entries, no BOS, `<|endoftext|>` between files.
2. *target*: next-token cross entropy on the corpus.
3. *rollouts*: the target's own continuations of corpus prefixes, greedy and sampled. A draft model
   has to predict what the target writes, which differs from what people wrote.
4. *draft*: distillation on corpus and rollouts. The loss is KL(target || draft), which is what
   bounds the acceptance of the rejection rule (1 - TV), plus cross entropy with the target's
   argmax, which is what the greedy match rule needs.

Hidden matrices are trained with Muon, the rest with AdamW, forward passes in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from demo_corpus import corpus_files, read_source
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20
VOCAB_SIZE = 4096
CONTEXT = 1024
END_OF_TEXT = "<|endoftext|>"
CHECKPOINT_EVERY = 50

TARGET_SHAPE = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=7, num_attention_heads=6)
DRAFT_SHAPE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)


# --- corpus -------------------------------------------------------------------------------------


class Corpus:
    """Token streams of the library proper and of its test suite, sampled two to one."""

    def __init__(self, files: list[Path], tokenizer: PreTrainedTokenizerFast) -> None:
        end = tokenizer.eos_token_id
        newline_ends = {i for token, i in tokenizer.get_vocab().items() if token.endswith("Ċ")}
        self.streams: list[torch.Tensor] = []
        self.starts: list[np.ndarray[Any, Any]] = []
        for in_tests in (False, True):
            texts = [read_source(f) for f in files if ("test" in f.parts or "tests" in f.parts) == in_tests]
            ids: list[int] = []
            for encoded in tokenizer.backend_tokenizer.encode_batch(texts):
                ids += [*encoded.ids, end]
            stream = np.array(ids, dtype=np.int64)
            # Windows start at lines that start at column 0, as prompts do.
            starts = 1 + np.flatnonzero(np.isin(stream[:-1], [*newline_ends, end]))
            self.streams.append(torch.from_numpy(stream))
            self.starts.append(starts[starts < len(stream) - CONTEXT - 1])

    def windows(self, count: int, length: int, rng: random.Random) -> torch.Tensor:
        """(count, length) token ids."""
        rows = []
        for _ in range(count):
            part = 0 if rng.random() < 2 / 3 else 1
            start = int(rng.choice(self.starts[part]))
            rows.append(self.streams[part][start : start + length])
        return torch.stack(rows)


def train_tokenizer(files: list[Path], where: Path) -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    library = [f for f in files if "test" not in f.parts and "tests" not in f.parts]
    bpe.train_from_iterator(
        (read_source(f) for f in library),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, model_max_length=CONTEXT, clean_up_tokenization_spaces=False
    ).save_pretrained(where)


# --- models -------------------------------------------------------------------------------------


def new_model(shape: dict[str, int], end_of_text: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end_of_text,
            pad_token_id=None,
            num_key_value_heads=2,
            **shape,
        )
    )


class Optimizer:
    """Muon for the hidden matrices, AdamW for the rest, one warm-up-stable-decay schedule."""

    def __init__(self, model: LlamaForCausalLM, num_steps: int) -> None:
        hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.parts = [
            torch.optim.Muon(hidden, lr=0.02, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(part, lambda step: schedule(step, num_steps)) for part in self.parts
        ]

    def step(self) -> None:
        for part, sched in zip(self.parts, self.schedules, strict=True):
            part.step()
            part.zero_grad(set_to_none=True)
            sched.step()

    def state(self) -> list[Any]:
        return [x.state_dict() for x in (*self.parts, *self.schedules)]

    def load(self, state: list[Any]) -> None:
        for x, saved in zip((*self.parts, *self.schedules), state, strict=True):
            x.load_state_dict(saved)


def schedule(step: int, num_steps: int) -> float:
    warmup, decay_from = 50, 0.5 * num_steps
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, max(0.0, (num_steps - step) / (num_steps - decay_from)))


def logits_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(input_ids=ids, use_cache=False).logits


# --- training -----------------------------------------------------------------------------------


class Run:
    """One training run: step, model, optimizer and log; resumes from a checkpoint."""

    def __init__(self, name: str, model: LlamaForCausalLM, num_steps: int, work: Path) -> None:
        self.name, self.model, self.num_steps = name, model, num_steps
        self.optimizer = Optimizer(model, num_steps)
        self.path = work / f"{name}.checkpoint.pt"
        self.log_path = work / f"{name}.log.jsonl"
        self.first_step = 0
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True)
            model.load_state_dict(saved["model"])
            self.optimizer.load(saved["optimizer"])
            self.first_step = saved["step"]
            print(f"{name}: going on from step {self.first_step}", flush=True)

    def checkpoint(self, step: int) -> None:
        part = self.path.with_suffix(".part")
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state(), "step": step}, part)
        part.replace(self.path)

    def log(self, **row: Any) -> None:
        line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        print(self.name, line, flush=True)
        with self.log_path.open("a") as f:
            f.write(line + "\n")


def rng_for(*what: object) -> random.Random:
    """A random generator for a seed and a purpose, so that a resumed run draws the same numbers."""
    return random.Random(":".join(map(str, (SEED, *what))))


def train_target(corpus: Corpus, held_out: torch.Tensor, model: LlamaForCausalLM, num_steps: int, work: Path) -> None:
    run = Run("target", model, num_steps, work)
    began = time.monotonic()
    for step in range(run.first_step, num_steps):
        # Most of the training uses short windows, which are cheaper; the end uses the full context.
        rows, length = (8, 512) if step < 0.85 * num_steps else (4, CONTEXT)
        ids = corpus.windows(rows, length + 1, rng_for("target", step))
        loss = F.cross_entropy(logits_of(model, ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.optimizer.step()
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == num_steps:
            with torch.no_grad():
                logits = torch.cat([logits_of(model, part[:, :-1]).float() for part in held_out.split(8)])
                held = F.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten())
            run.log(
                step=step + 1,
                loss=loss.item(),
                held_out_loss=held.item(),
                seconds_per_step=(time.monotonic() - began) / (step + 1 - run.first_step),
            )
            run.checkpoint(step + 1)


@torch.no_grad()
def write_rollouts(corpus: Corpus, target: LlamaForCausalLM, num_rollouts: int, work: Path) -> None:
    """The target's continuations: (num_rollouts, prefix + continuation), the prefix length in front."""
    batches = []
    new_tokens, batch = 192, 128
    for i in range(0, num_rollouts, batch):
        rng = rng_for("rollouts", i)
        prefix = rng.choice((16, 32, 64, 128))
        greedy = rng.random() < 0.75
        torch.manual_seed(SEED + i)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ids = target.generate(
                corpus.windows(batch, prefix, rng),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=not greedy,
                temperature=None if greedy else 0.8,
                top_k=0 if not greedy else None,
                pad_token_id=0,
            )
        batches.append(ids[:, : prefix + new_tokens])
        print(f"rollouts {i + batch}/{num_rollouts}", flush=True)
    part = work / "rollouts.part"
    torch.save(batches, part)
    part.replace(work / "rollouts.pt")


def distil(
    corpus: Corpus,
    held_out: torch.Tensor,
    target: LlamaForCausalLM,
    model: LlamaForCausalLM,
    num_steps: int,
    work: Path,
) -> None:
    rollouts = torch.load(work / "rollouts.pt", weights_only=True)
    run = Run("draft", model, num_steps, work)
    began = time.monotonic()
    for step in range(run.first_step, num_steps):
        rng = rng_for("draft", step)
        # The share of the target's own text grows, since that is what the draft model has to predict.
        if rng.random() < 0.3 + 0.5 * step / num_steps:
            rows = rng.choice(rollouts)
            ids = rows[torch.tensor(rng.sample(range(len(rows)), 24))]
        else:
            ids = corpus.windows(16, 320, rng)
        with torch.no_grad():
            wanted = logits_of(target, ids).float().flatten(0, 1)
        given = F.log_softmax(logits_of(model, ids).float().flatten(0, 1), dim=-1)
        divergence = F.kl_div(given, F.log_softmax(wanted, dim=-1), log_target=True, reduction="batchmean")
        argmax_loss = F.nll_loss(given, wanted.argmax(-1))
        (divergence + 0.5 * argmax_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.optimizer.step()
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == num_steps:
            with torch.no_grad():
                agreement = torch.cat(
                    [logits_of(target, p).argmax(-1) == logits_of(model, p).argmax(-1) for p in held_out.split(8)]
                )
            run.log(
                step=step + 1,
                kl=divergence.item(),
                argmax_loss=argmax_loss.item(),
                held_out_agreement=agreement.float().mean().item(),
                seconds_per_step=(time.monotonic() - began) / (step + 1 - run.first_step),
            )
            run.checkpoint(step + 1)


# --- all stages --------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, where: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(where)
    tokenizer.save_pretrained(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo-pair"), help="checkpoints and logs")
    parser.add_argument("--out", type=Path, default=Path("runtime/demo_pair"), help="where the pair is written")
    parser.add_argument("--target-steps", type=int, default=1300)
    parser.add_argument("--rollouts", type=int, default=2560)
    parser.add_argument("--draft-steps", type=int, default=700)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)

    training, held_out_files = corpus_files()
    if not (args.work / "tokenizer").exists():
        train_tokenizer(training, args.work / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.work / "tokenizer")
    corpus, held_out_corpus = Corpus(training, tokenizer), Corpus(held_out_files, tokenizer)
    held_out = held_out_corpus.windows(32, 513, rng_for("held out"))
    print(
        f"{len(training)} files, {sum(map(len, corpus.streams)):,} tokens to train on; "
        f"{len(held_out_files)} files, {sum(map(len, held_out_corpus.streams)):,} tokens held out",
        flush=True,
    )

    target = new_model(TARGET_SHAPE, tokenizer.eos_token_id)
    print(f"target: {target.num_parameters():,} parameters", flush=True)
    train_target(corpus, held_out, target, args.target_steps, args.work)
    target.eval()
    if not (args.work / "rollouts.pt").exists():
        write_rollouts(corpus, target, args.rollouts, args.work)
    draft = new_model(DRAFT_SHAPE, tokenizer.eos_token_id)
    print(f"draft: {draft.num_parameters():,} parameters", flush=True)
    distil(corpus, held_out, target, draft, args.draft_steps, args.work)

    save(target, tokenizer, args.out / "target")
    save(draft, tokenizer, args.out / "draft")


if __name__ == "__main__":
    main()
