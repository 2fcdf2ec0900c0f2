"""DS-FL, written by following the tutorial: the mean prediction on public data, sharpened, teaches all agents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier

import codistill as cd
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class DSFL(cd.Protocol):
    """Itahara et al. Distillation-Based Semi-Supervised Federated Learning. IEEE Transactions on Mobile Computing 2023.

    In each round agent k trains on its shard and sends its predictions t̂_k = F(o | w_k) for `queries` public samples o,
    drawn anew each round. The hub returns t̂ = softmax(1/K Σ_k t̂_k / T): with T < 1 the entropy of the mean is reduced
    (ERA), as the mean of unequal agents says too little. Every agent takes steps down the cross-entropy to t̂. An agent
    whose learner only fits and predicts is fitted anew to its labels and the newest t̂ of each public sample.
    """

    name = "ds_fl"
    exchanges = "predictions on public data, to and from the hub"
    needs = cd.Ability.PREDICT
    needs_public = True

    local_epochs: int = cd.setting(5, "epochs of local training per round", at_least=0)
    public_epochs: int = cd.setting(5, "epochs of distillation per round", at_least=0)
    batch_size: int = cd.setting(32, "samples per gradient step", at_least=1)
    queries: int = cd.setting(200, "public samples per round", at_least=1)
    temperature: float = cd.setting(0.1, "T of the entropy reduction; smaller is sharper", above=0)
    aggregate: str = cd.setting("era", "entropy reduction, or the plain mean", choices=("era", "mean"))

    async def begin(self, me: cd.Agent) -> None:
        if cd.Ability.GRADIENTS not in me.learner.abilities:
            me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: cd.Agent, t: int) -> None:
        takes_steps = cd.Ability.GRADIENTS in me.learner.abilities
        if takes_steps:
            parts.train_locally(me, me.shard.batches(t, self.batch_size, self.local_epochs))
        if len(me.present) == 1:  # its own predictions, sharpened, teach an agent nothing
            return
        ids, o = next(me.public.batches(t, min(self.queries, len(me.public))))  # the same for all agents
        predicted = me.learner.predict(me.public.x[ids]).astype(np.float32)  # t̂_k
        reply = await me.ask_hub(t=predicted, expect={"t": predicted})
        if reply is None:
            return
        taught = np.clip(reply["t"], 0, 1)
        if takes_steps:
            for epoch in range(self.public_epochs):
                order = torch.from_numpy(me.rng("order", epoch).permutation(len(ids)))
                for rows in order.split(self.batch_size):
                    # cross-entropy to t̂: the divergence from it, up to a constant
                    logits = torch.from_numpy(taught)[rows].clamp_min(1e-6).log()
                    me.learner.descend(parts.distillation(me.learner(o[rows]), logits))
            return
        soft = me.state.setdefault("taught", np.zeros((len(me.public), me.classes), np.float32))
        soft[ids] = taught
        known = soft.any(axis=1)
        x = np.concatenate([me.shard.x, me.public.x[known]])
        me.learner.fit(x, np.concatenate([me.shard.targets, soft[known]]))

    async def hub(self, me: cd.Hub, t: int) -> None:
        ids, _ = next(me.public.batches(t, min(self.queries, len(me.public))))
        heard = await me.gather(expect={"t": np.empty((len(ids), me.classes), np.float32)})
        if not heard:
            await me.skip()
            return
        mean = np.mean([message["t"] for message in heard.values()], axis=0)
        told = reduced_entropy(mean, self.temperature) if self.aggregate == "era" else mean
        await me.broadcast(t=told.astype(np.float32))
        entropy = float(-(told * np.log(np.maximum(told, 1e-12))).sum(axis=1).mean())
        me.measure(me.present, entropy=np.full(len(me.present), entropy))


def reduced_entropy(mean: np.ndarray, temperature: float) -> np.ndarray:
    """softmax(mean / T), row by row."""
    scaled = (mean - mean.max(axis=1, keepdims=True)) / temperature
    weights = np.exp(scaled)
    return weights / weights.sum(axis=1, keepdims=True)


def main() -> None:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    torch.manual_seed(0)
    agents = []
    for name, missing in {"net a": [7, 8, 9], "forest": [0, 1, 2], "net b": [3, 4, 5]}.items():
        mine = np.flatnonzero(~np.isin(y[:900], missing))[len(agents) :: 6]  # some 100 samples
        module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        model = RandomForestClassifier(50) if name == "forest" else cd.TorchLearner(module, lr=0.01)
        agents.append(cd.Agent(name, model, x[mine], y[mine]))
    federation = cd.Federation(agents, DSFL(), public=x[900:1300], test=(x[1300:], y[1300:]))
    result = federation.run(rounds=8, progress=False)
    print(result)
    gain = np.mean([line.gain for line in result.summary().lines()])
    assert gain > 0.02, f"the agents should learn from one another, but the mean gain is {gain:.3f}"


if __name__ == "__main__":
    main()
