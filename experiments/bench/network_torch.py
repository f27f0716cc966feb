"""One PyTorch host of `experiments.bench.network`: DistributedDataParallel over Gloo.

    python -m experiments.bench.network_torch HOST HOSTS ADDRESS INTERFACE BATCH FILE

The same network, data and loop as the JAX hosts. Needs PyTorch and NumPy alone; the
parent chooses an interpreter that has them.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.network_host import (
    Batches,
    Digits,
    Spec,
    learning_rate,
    read_digits,
    serve,
    take_turn,
    train,
)

# An optional peer, which the type checker need not know.
torch: Any = importlib.import_module("torch")
nn, dist, functional = torch.nn, torch.distributed, torch.nn.functional

TIMING = Spec(rate=1e-3, steps=0, warmup=1)
# PowerSGD's hook wants two dense steps at least.
_POWERSGD_START = 2
_ONE_BUCKET_MB = 1024


class Block(nn.Module):
    """Pre-norm block, as `experiments.models.transformer.Block`."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width, eps=1e-6)
        self.mlp_in = nn.Linear(width, hidden)
        self.mlp_out = nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        """[B, L, D] -> [B, L, D]."""
        rows, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x))
        # Columns lie by head: [heads, 3, head width].
        parts = qkv.reshape(rows, length, self.heads, 3, -1)
        q, k, v = parts.permute(3, 0, 2, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        hidden = functional.gelu(self.mlp_in(self.norm_mlp(x)), approximate="tanh")
        return x + self.mlp_out(hidden)


class ViT(nn.Module):
    """The network of `network_task.VIT`, from the weights that JAX drew."""

    def __init__(self, digits: Digits) -> None:
        super().__init__()
        c, weights = digits.config, digits.weights
        width, self.patch = c["width"], c["patch_size"]
        self.patches = nn.Linear(self.patch**2, width)
        self.positions = nn.Parameter(torch.empty(weights["positions"].shape))
        self.blocks = nn.ModuleList(
            Block(width, c["mlp_width"], c["heads"]) for _ in range(c["depth"])
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, c["classes"])
        self.load_state_dict(dict(_torch_names(weights)))

    def forward(self, images: Any) -> Any:
        """[B, 28, 28] -> logits [B, classes]."""
        rows, side, _ = images.shape
        across = side // self.patch
        x = images.reshape(rows, across, self.patch, across, self.patch)
        x = x.transpose(2, 3).reshape(rows, across * across, -1)
        x = self.patches(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def _torch_names(weights: Mapping[str, np.ndarray]) -> Any:
    """JAX's names and layouts as PyTorch's."""
    for name, x in weights.items():
        name = name.replace(".attention.", ".")
        if name.endswith("kernel"):
            x, name = x.T, name.replace("kernel", "weight")
        yield name.replace("scale", "weight"), torch.tensor(x)


def make_model(name: str, digits: Digits) -> Any:
    """The network, with what averages its gradients; all hosts must call it."""
    model = ViT(digits)
    if name == "torch_alone":
        return model
    # The collectives that PowerSGD's hook starts for one bucket when those before have
    # ended may overtake another bucket's on one host and not on the next, and Gloo
    # fails by "Received data size doesn't match expected size": one bucket for all.
    cap = _ONE_BUCKET_MB if name.startswith("torch_powersgd") else None
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)
    package = "torch.distributed.algorithms.ddp_comm_hooks"
    if name == "torch_fp16":
        hooks = importlib.import_module(f"{package}.default_hooks")
        model.register_comm_hook(None, hooks.fp16_compress_hook)
    elif name.startswith("torch_powersgd"):
        hooks = importlib.import_module(f"{package}.powerSGD_hook")
        state = hooks.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=int(name.removeprefix("torch_powersgd")),
            start_powerSGD_iter=_POWERSGD_START,
        )
        model.register_comm_hook(state, hooks.powerSGD_hook)
    return model


class TorchContestant:
    """This process' part of a PyTorch contender; see `network_host.Contestant`."""

    def __init__(self, digits: Digits) -> None:
        self._digits = digits
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._spec = TIMING
        self._model: Any = None
        self._adamw: Any = None
        self._steps = 0

    def begin(self, name: str, spec: Spec) -> None:
        """See there; where only steps are timed, the model goes on where it was."""
        self._spec, self._steps = spec, 0
        if spec == TIMING and name in self._kept:
            self._model, self._adamw = self._kept[name]
            return
        self._model = make_model(name, self._digits)
        self._adamw = torch.optim.AdamW(
            self._model.parameters(), lr=spec.rate, weight_decay=0.01
        )
        if spec == TIMING:
            self._kept[name] = (self._model, self._adamw)

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        """See there."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self._spec, self._steps)
        self._steps += 1
        self._adamw.zero_grad()
        logits = self._model(torch.from_numpy(images))
        target = torch.from_numpy(labels.astype(np.int64))
        loss = functional.cross_entropy(logits, target)
        loss.backward()
        self._adamw.step()
        return float(loss.detach())

    def test(self) -> tuple[float, float]:
        """See there."""
        inner = getattr(self._model, "module", self._model)
        with torch.no_grad():
            logits = inner(torch.from_numpy(self._digits.test_images))
            labels = torch.from_numpy(self._digits.test_labels.astype(np.int64))
            loss = functional.cross_entropy(logits, labels)
            correct = (logits.argmax(dim=1) == labels).float().mean()
        return float(correct), float(loss)

    def barrier(self) -> None:
        """See there."""
        dist.barrier()


def main(argv: Sequence[str]) -> int:
    """Ends with its input."""
    host, hosts, batch = int(argv[0]), int(argv[1]), int(argv[4])
    address, interface = argv[2:4]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=host, world_size=hosts
    )
    digits = read_digits(Path(argv[5]))
    contestant = TorchContestant(digits)
    batches = Batches(digits, batch, host, hosts)

    def prepare(names: Sequence[str], steps: int) -> Any:
        for name in names:
            contestant.begin(name, TIMING)
            take_turn(contestant, batches, interface, steps)
        return sum(x.numel() for x in ViT(digits).parameters())

    def turn(name: str, steps: int) -> Any:
        contestant.begin(name, TIMING)
        return take_turn(contestant, batches, interface, steps)

    def run(name: str, rate: float, steps: int, warmup: int, every: int) -> Any:
        spec = Spec(rate, steps, warmup)
        contestant.begin(name, spec)
        stream = Batches(digits, batch, host, hosts)
        return train(contestant, stream, spec, every, host)

    serve({"prepare": prepare, "turn": turn, "train": run})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
