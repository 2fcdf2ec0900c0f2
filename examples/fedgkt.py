"""Split distillation after FedGKT, written by following the tutorial: a large model on the hub learns from features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import codistill as cd
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class FedGKT(cd.Protocol):
    """He, Annavaram, Avestimehr. Group Knowledge Transfer. NeurIPS 2020.

    Agents train a small extractor and head down CE + KL to the hub's outputs on their samples. They send features h,
    outputs p and labels y of these; the hub trains a larger model on h down CE + KL to p, and returns its outputs. An
    agent predicts by its extractor and the hub's model, of which the hub sends the weights.
    """

    name = "fedgkt"
    exchanges = "features, outputs and labels of private samples to the hub; outputs and the hub's model back"
    needs = cd.Ability.GRADIENTS | cd.Ability.FEATURES

    local_epochs: int = cd.setting(5, "epochs of local training per round", at_least=0)
    hub_epochs: int = cd.setting(5, "epochs on the hub per round and agent", at_least=1)
    batch_size: int = cd.setting(32, "samples per gradient step", at_least=1)
    lr: float = cd.setting(0.003, "learning rate on the hub", above=0)
    weight: float = cd.setting(1.0, "of the distillation loss, on both sides", at_least=0)

    async def begin(self, me: cd.Agent) -> None:
        parts.same_initial_weights(me)  # so that features mean the same to the hub, whoever sent them

    async def round(self, me: cd.Agent, t: int) -> None:
        x, y = torch.from_numpy(me.shard.x), torch.from_numpy(me.shard.targets)
        for epoch in range(self.local_epochs):
            order = torch.from_numpy(me.rng("order", epoch).permutation(len(x)))
            for ids in order.split(self.batch_size):
                f = me.learner(x[ids])
                loss = me.learner.loss(f, y[ids])
                if "hub" in me.state:
                    taught = torch.from_numpy(me.state["hub"])[ids]
                    loss = loss + self.weight * parts.distillation(f, taught)
                me.learner.descend(loss)
        h, p = me.learner.evaluated_features(me.shard.x), me.learner.predict(me.shard.x)
        model = _network(h.shape[1], me.classes).state_dict()
        expect = {"f": p.shape, **{name: tuple(tensor.shape) for name, tensor in model.items()}}
        reply = await me.ask_hub(h=h, p=p, y=me.shard.targets, expect=expect)
        if reply is not None:
            me.state["hub"] = reply["f"].copy()
            me.state["model"] = {name: torch.from_numpy(reply[name].copy()) for name in model}

    def predict(self, me: cd.Agent, x: np.ndarray) -> np.ndarray:
        if "model" not in me.state:  # before the first reply
            return me.learner.predict(x)
        h = torch.from_numpy(me.learner.evaluated_features(x))
        model = _network(h.shape[1], me.classes)
        model.load_state_dict(me.state["model"])
        with torch.inference_mode():
            return torch.softmax(model(h), dim=1).numpy()

    def serve(self, me: cd.Hub, sender: str, message: cd.Message) -> cd.Message | None:
        shape = (None, me.classes)
        if not me.accepts(sender, message, {"h": (None, None), "p": shape, "y": shape}):
            return None
        h, p, y = (torch.from_numpy(message[name].copy()) for name in ("h", "p", "y"))
        model, optimiser = self._model(me, h.shape[1])
        for epoch in range(self.hub_epochs):
            for ids in torch.from_numpy(me.rng(sender, epoch).permutation(len(h))).split(self.batch_size):
                f = model(h[ids])
                loss = nn.functional.cross_entropy(f, y[ids])
                loss = loss + self.weight * parts.distillation(f, p[ids].clamp_min(1e-6).log())
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        me.state["model"] = {"weights": model.state_dict(), "optimiser": optimiser.state_dict()}
        return cd.Message.of(f=model(h), **model.state_dict())

    def _model(self, me: cd.Hub, width: int) -> Any:
        """The hub's model and its optimiser: at hand, or from the checkpoint, or new."""
        if "model" not in me.memo:
            me.seed_alike("model")
            model = _network(width, me.classes)
            optimiser = torch.optim.Adam(model.parameters(), self.lr)
            if "model" in me.state:
                model.load_state_dict(me.state["model"]["weights"])
                optimiser.load_state_dict(me.state["model"]["optimiser"])
            me.memo["model"] = model, optimiser
        return me.memo["model"]


def _network(width: int, classes: int) -> nn.Sequential:
    """The model of the hub."""
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, classes))


def main() -> None:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    torch.manual_seed(0)
    agents = []
    for number in range(4):
        mine = np.arange(60 * number, 60 * number + 60)
        module = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
        agents.append(cd.Agent(f"agent {number}", cd.TorchLearner(module, lr=0.005), x[mine], y[mine]))
    federation = cd.Federation(agents, FedGKT(), test=(x[1300:], y[1300:]))
    result = federation.run(rounds=8, progress=False)
    print(result)
    gain = np.mean([line.gain for line in result.summary().lines()])
    assert gain > 0.02, f"the agents should learn from the hub, but the mean gain is {gain:.3f}"


if __name__ == "__main__":
    main()
