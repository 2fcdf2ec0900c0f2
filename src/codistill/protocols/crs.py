"""CRS: contrastive representation sharing, through a relay or between neighbours, at everybody's own pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from codistill.protocol import HUB, Ability, Agent, Hub, Message, Protocol, setting
from codistill.protocols import parts

_MOST = 64  # observations per class in a message
_MEANS, _PRINTED = ("mean", "sum"), ("form", "sum")


@dataclass(frozen=True, kw_only=True)
class CRS(Protocol):
    """Berdoz, Singh, Jaggi, Raskar. Scalable Collaborative Learning via Representation Sharing. 2022. Algorithms 1, 2.

    s = φ_u(x): features of agent u, the input of its head τ_u. t̄^c: global representation of class c, the
    mean over agents of their mean features; t_m^c: an observation, the mean of n_avg features of one other agent.
    In a round an agent downloads t̄ and M_down observations, trains on L_CE + λ_KD L_KD + λ_disc L_disc (6), and uploads
    its own mean and M_up observations. L_disc: whether τ_u can tell if s and t^c are of one class, by ĥ(s, t) =
    ⟨softmax τ_u(s), softmax τ_u(t)⟩ (5). The hub is a relay: it keeps the last upload of each agent, and never trains.

    Between neighbours only observations are sent, and t̄ is the mean of those received. Without rounds, what others have
    sent is used until they send again, or until it is older than `oldest`.
    Deviations: L_KD is a mean over features and L_disc one over the C pairs of a sample; `form` = "printed" has both
    sums, with which λ_KD = 10 does not learn, and the random start. What nobody has sent, or an agent has fewer than
    `smallest_group` samples of, is left out, never a zero vector. A class with fewer than n_avg samples is averaged
    over those there are. t̄^c needs another agent with class c. A diverged model leaves both out.
    """

    name = "crs"
    paper = "Berdoz, Singh, Jaggi, Raskar 2022"
    exchanges = "mean features per class, through a relay or between neighbours"
    needs = Ability.GRADIENTS | Ability.FEATURES
    hub_is_optional = True
    asynchronous = True
    chosen_by_agents = (
        "kd_weight", "disc_weight", "average_over", "uploads", "downloads", "release_classes", "release_share",
        "smallest_group", "listen_to", "oldest", "local_epochs", "local_steps", "batch_size",
    )  # fmt: skip

    local_epochs: int = setting(1, "E, epochs of local training per round", at_least=0)
    local_steps: int | None = setting(None, "gradient steps per round, instead of epochs", at_least=0)
    batch_size: int = setting(32, "samples per gradient step", at_least=1)
    kd_weight: float = setting(10.0, "λ_KD, of the distance to the global representation", at_least=0)
    disc_weight: float = setting(1.0, "λ_disc, of the contrast with observations of others", at_least=0)
    form: str = setting("mean", "printed: features = sum, pairs = sum, start = random", choices=("mean", "printed"))
    features: str = setting("mean", "over the features in L_KD; sum: as printed", choices=_MEANS, with_other=_PRINTED)
    pairs: str = setting("mean", "over the C pairs in L_disc; sum: as printed", choices=_MEANS, with_other=_PRINTED)
    start: str = setting(
        "none", "t̄ and t_m in round 1, with a hub; random: as printed", choices=("none", "random"),
        with_other=("form", "random"),
    )  # fmt: skip
    average_over: int = setting(10, "n_avg, samples in an observation, at least smallest_group", at_least=1)
    uploads: int = setting(1, "M_up, observations per class that an agent releases", at_least=0, at_most=_MOST)
    downloads: int = setting(1, "M_down, observations per class that it uses", at_least=0, at_most=_MOST)
    release_classes: tuple[int, ...] | None = setting(None, "classes whose means it releases; unset: all", at_least=0)
    release_share: float = setting(1.0, "share of its samples in what it releases", at_least=0, at_most=1)
    smallest_group: int = setting(2, parts.SMALLEST, at_least=1)
    listen_to: tuple[str, ...] | None = setting(None, "agents that it learns from; unset: all")
    oldest: float | None = setting(None, "age up to which it uses what others sent: rounds, or seconds", above=0)
    aggregate: str = setting("mean", "how the means of many become t̄", choices=parts.PLAIN_KINDS)
    trim: float = setting(0.2, parts.TRIM, at_least=0, at_most=0.49)

    async def round(self, me: Agent, t: int) -> None:
        """Algorithm 1, for one agent."""
        if me.topology.hub:
            await self._download(me)
        self._train(me, t)
        bounds = self.release_classes, self.release_share, self.smallest_group
        own, held = parts.own_representations(me, self.average_over, self.uploads, *bounds)
        if not me.topology.hub:
            heard = await me.exchange({"observations": own[1:], "held": held} if held.any() else None)
            parts.keep_observations(me, heard, own.shape[2], _MOST)
        elif held.any():
            await me.send(HUB, representations=own, held=held)  # {t̄_u^c}, {t_u,m^c}

    def _train(self, me: Agent, t: int) -> None:
        """Algorithm 2, LOCALUPDATE: from t = (t̄, t_1, ..., t_M), and which of them there are."""
        received, known = map(torch.tensor, self._received(me, t))
        for x, y in me.shard.batches(t, self.batch_size, self.local_epochs, self.local_steps):
            f, s = me.learner.with_features(x)
            label = y.argmax(dim=1)
            loss = me.learner.loss(f, y)  # L_CE
            if known[:1].any() and not me.diverged:
                # L_KD = 1/|B| Σ_i |s_i - t̄^y_i|²
                distance = (s - received[0, label]).square()
                distance = distance.sum(dim=1) if self.features == "sum" else distance.mean(dim=1)
                loss = loss + self.kd_weight * (distance * known[0, label]).mean()
            if known[1:].any() and not me.diverged:
                m = torch.randint(1, len(known), (len(label),))  # m ~ UNIFORM(1, ..., M_down)
                log_q = torch.log_softmax(me.learner.head(received), dim=2)
                # L_disc = 1/|B| Σ_i (ℓ_disc(1, s_i, t_m^y_i) + Σ_{c ≠ y_i} ℓ_disc(0, s_i, t_m^c))
                l_disc = parts.contrast(f.log_softmax(dim=1), label, log_q[m], known[m], mean=self.pairs == "mean")
                loss = loss + self.disc_weight * l_disc
            me.learner.descend(loss)

    def _received(self, me: Agent, t: int) -> tuple[np.ndarray, np.ndarray]:
        """(1 + M, C, d): t̄ and the observations for this round; (1 + M, C): which there are, and not too old."""
        nothing = np.zeros((1, me.classes, 1), np.float32), np.zeros((1, me.classes), dtype=bool)
        if me.topology.hub:
            last = me.state.get("relayed")
            if last is None:  # Algorithm 1: {t̄^c} and {t_m^c} are initialised randomly, the same for all agents
                random = self.start == "random" and t == 0 and len(me.roster) > 1
                return parts.random_representations(me, self.downloads) if random else nothing
            age = last["age"] + np.where(last["age"] < 0, 0.0, me.time - last["time"])
            return last["representations"], (age >= 0) & (age <= (self.oldest or np.inf))
        heard = parts.recent(me.state.get("heard", {}), me.time, self.oldest)
        used = [each for name, each in heard.items() if self.listen_to is None or name in self.listen_to]
        if not any(len(each["observations"]) for each in used):
            return nothing
        # Without a hub, the mean of the observations that were received stands for t̄.
        received, age = parts.drawn_representations(me.rng("draw"), used, self.downloads, me.time)
        return received, age >= 0

    async def _download(self, me: Agent) -> None:
        """{t̄^c} and M_down observations, of the relay; where the reply is lost, those of the last one stay."""
        shape, features = (1 + self.downloads, me.classes), int(me.learner.head.in_features)
        like = {"representations": np.empty((*shape, features), np.float32), "age": np.empty(shape, np.float32)}
        wish = {"downloads": self.downloads, "oldest": self.oldest or 0.0, "listen_to": list(self.listen_to or ())}
        reply = await me.ask_hub(wish, expect=like)
        if reply is not None:
            me.state["relayed"] = {**{key: reply[key] for key in like}, "time": me.time}

    def serve(self, me: Hub, sender: str, message: Message) -> Message | None:
        """The relay: keep an upload, or answer a download with t̄, the mean of all, and observations of others."""
        uploads = me.state.setdefault("uploads", {})
        if "representations" in message:
            features = me.hellos[sender].features if sender in me.hellos else None
            if parts.accepts_representations(me, sender, message, "representations", features, 1 + _MOST):
                own, held = message["representations"], message["held"]
                uploads[sender] = {"mean": own[0], "observations": own[1:], "held": held, "time": me.time}
            return None
        if not me.accepts(sender, message, {"downloads": int, "oldest": float, "listen_to": list}):
            return Message()
        used = parts.recent(uploads, me.time, message["oldest"] or None)
        wanted = [name for name in used if name == sender or not message["listen_to"] or name in message["listen_to"]]
        others = [used[name] for name in wanted if name != sender]
        if not others:
            return Message()
        means, held = (np.stack([used[name][key] for name in wanted]) for key in ("mean", "held"))
        aggregation = parts.Aggregation(kind=self.aggregate, trim=self.trim, outputs=False, hub=me)
        mean = parts.mean_representations(means, held, aggregation)  # t̄^c
        count = min(max(message["downloads"], 0), _MOST)
        received, age = parts.drawn_representations(me.rng("draw", sender), others, count, me.time, mean)
        return Message.of(representations=received, age=age)

    def check(self, agents: Sequence[Agent]) -> None:
        """There must be classes, and features of one dimension that are not the samples themselves."""
        parts.check_features(agents, self.name, by_class=True)
        parts.check_head(agents, self.name)
        parts.check_sharing(agents, self)
