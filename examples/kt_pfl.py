"""KT-pFL, written by following the tutorial: each agent learns weights on the others' predictions on public data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits

import codistill as cd
from codistill.protocols import parts


@dataclass(frozen=True, kw_only=True)
class KTpFL(cd.Protocol):
    """Zhang et al. Parameterized Knowledge Transfer for Personalized Federated Learning. NeurIPS 2021.

    p_m: predictions of agent m on public data. Agent n learns from Σ_m c_nm p_m; its weights c_n take steps down
    KL(Σ_m c_nm p_m ‖ p_n) + ρ |c_n - 1/N|². Without a hub: each agent keeps its own row of c.
    """

    name = "kt_pfl"
    exchanges = "predictions on public data, between all pairs of agents"
    needs = cd.Ability.GRADIENTS
    needs_public = True
    topology = "complete"

    local_epochs: int = cd.setting(2, "epochs of local training per round", at_least=0)
    batch_size: int = cd.setting(32, "samples per gradient step", at_least=1)
    lr_c: float = cd.setting(0.02, "learning rate of the weights c", above=0)
    rho: float = cd.setting(0.7, "ρ, holds the weights to 1/N", at_least=0)

    async def round(self, me: cd.Agent, t: int) -> None:
        parts.train_locally(me, me.shard.batches(t, self.batch_size, self.local_epochs))
        p = me.learner.predict(me.public.x)
        heard = await me.exchange(p=p, expect={"p": p})
        if not heard:
            return
        everyone = torch.from_numpy(np.stack([p, *(message["p"] for message in heard.values())]))
        kept = me.state.setdefault("c", {name: 1 / len(me.roster) for name in me.roster})
        names = [me.name, *heard]
        c = torch.tensor([kept[name] for name in names], requires_grad=True)
        # c_n ← c_n - η ∇ {KL(Σ_m c_nm p_m ‖ p_n) + ρ |c_n - 1/N|²}, held to weights that are positive and sum to 1
        mixed = torch.einsum("m,mik->ik", c, everyone).clamp_min(1e-6)
        loss = (mixed * (mixed / everyone[0].clamp_min(1e-6)).log()).sum(dim=1).mean()
        (gradient,) = torch.autograd.grad(loss + self.rho * (c - 1 / len(me.roster)).square().sum(), c)
        c = (c.detach() - self.lr_c * gradient).clamp_min(0)
        c = c / c.sum()
        kept.update(zip(names, c.tolist(), strict=True))
        target = torch.einsum("m,mik->ik", c, everyone)
        for ids, u in me.public.batches(t, self.batch_size):
            me.learner.descend(parts.distillation(me.learner(u), target[ids].clamp_min(1e-6).log()))
        me.measure(me.name, own_weight=kept[me.name])


def main() -> None:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    torch.manual_seed(0)
    agents = []
    for name, missing in {"a": [8, 9], "b": [8, 9], "c": [0, 1]}.items():
        mine = np.flatnonzero(~np.isin(y[:900], missing))[len(agents) :: 10]  # some 70 samples
        module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        agents.append(cd.Agent(name, cd.TorchLearner(module, lr=0.01), x[mine], y[mine]))
    federation = cd.Federation(agents, KTpFL(), public=x[900:1300], test=(x[1300:], y[1300:]))
    result = federation.run(rounds=8, progress=False)
    print(result)
    print(result.frame().tail(3)[["agent", "accuracy", "own_weight"]].to_string(index=False))
    gain = np.mean([line.gain for line in result.summary().lines()])
    assert gain > 0.02, f"the agents should learn from one another, but the mean gain is {gain:.3f}"


if __name__ == "__main__":
    main()
