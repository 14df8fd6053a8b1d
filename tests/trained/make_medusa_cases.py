"""Writes the cases of `test_medusa.py`: tiny heads as the authors define them, in torch, and the logits that they give.

    pip install torch numpy safetensors
    python tests/trained/make_medusa_cases.py tests/trained/medusa

None is needed to run the test. The definition: `MedusaModel` in https://github.com/FasterDecoding/Medusa, where a head
is a sequence of residual blocks, x + SiLU(W x + b), and a linear layer without a bias.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

HIDDEN_SIZE, VOCAB_SIZE, NUM_HEADS, NUM_TOKENS = 16, 40, 3, 5


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        return hidden + nn.functional.silu(self.linear(hidden))


def write(folder: Path, num_layers: int, *, as_pickle: bool, dtype: torch.dtype = torch.float32) -> None:
    """Write heads with random weights, and their logits for random hidden states."""
    torch.manual_seed(num_layers)
    heads = nn.ModuleList(
        nn.Sequential(*(Block() for _ in range(num_layers)), nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False))
        for _ in range(NUM_HEADS)
    )
    for weights in heads.parameters():
        weights.data = (torch.randn_like(weights.data) * 0.4).to(dtype)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE)
    folder.mkdir(parents=True, exist_ok=True)
    # As the authors' trainer writes it.
    if as_pickle:
        torch.save(heads.state_dict(), folder / "medusa_lm_head.pt")
    else:
        save_file(heads.state_dict(), folder / "medusa_lm_head.safetensors")
    with torch.no_grad():
        logits = torch.stack([head(hidden) for head in heads.float()])
    config = {
        # As in the authors' own folders, which say fewer than there are.
        "medusa_num_heads": NUM_HEADS - 1 if as_pickle else NUM_HEADS,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    np.savez_compressed(folder / "expected.npz", hidden=hidden.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    where = Path(sys.argv[1])
    write(where / "one_block", 1, as_pickle=False)
    write(where / "two_blocks", 2, as_pickle=True)
    write(where / "bfloat16", 1, as_pickle=True, dtype=torch.bfloat16)
