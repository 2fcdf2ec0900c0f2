"""A protocol of one's own in 30 lines: trust an agent on a class as far as it has seen that class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression

import codistill as cd


@dataclass(frozen=True, kw_only=True)
class Coverage(cd.Protocol):
    """Public samples are labelled by a vote; on class c an agent's vote weighs as many samples of c as it holds."""

    name = "coverage"
    exchanges = "predictions on public data and class counts, to and from the hub"
    needs_public = True

    own_weight: int = cd.setting(1, "how often the own samples are repeated beside the public ones", at_least=1)

    async def begin(self, me: cd.Agent) -> None:
        me.learner.fit(me.shard.x, me.shard.targets)

    async def round(self, me: cd.Agent, t: int) -> None:
        p = me.learner.predict(me.public.x)
        reply = await me.ask_hub(p=p, seen=me.shard.targets.sum(axis=0), expect={"vote": p.shape})
        if reply is not None:
            x = np.concatenate([me.shard.x] * self.own_weight + [me.public.x])
            me.learner.fit(x, np.concatenate([me.shard.targets] * self.own_weight + [reply["vote"]]))

    async def hub(self, me: cd.Hub, t: int) -> None:
        heard = await me.gather(expect={"p": (len(me.public), me.classes), "seen": (me.classes,)})
        if heard:
            votes = np.sum([message["p"] * message["seen"] for message in heard.values()], axis=0) + 1e-6
            await me.broadcast(vote=votes / votes.sum(axis=1, keepdims=True))


def main() -> None:
    x, y = load_digits(return_X_y=True)
    parts = np.array_split(np.argsort(y[:1000], kind="stable"), 3)  # each agent sees three or four digits
    models = {
        "forest": RandomForestClassifier(),
        "linear": LogisticRegression(max_iter=5000),
        "trees": ExtraTreesClassifier(),
    }
    agents = [
        cd.Agent(name, model, x[part] / 16, y[part]) for (name, model), part in zip(models.items(), parts, strict=True)
    ]
    federation = cd.Federation(agents, Coverage(), public=x[1000:1300] / 16, test=(x[1300:] / 16, y[1300:]))
    result = federation.run(rounds=3, progress=False)
    print(result)
    gain = np.mean([line.gain for line in result.summary().lines()])
    assert gain > 0.1, f"the agents should learn from one another, but the mean gain is {gain:.3f}"


if __name__ == "__main__":
    main()
