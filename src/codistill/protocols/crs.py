"""CRS: contrastive representation sharing, through a relay or between neighbours, at everybody's own pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from codistill.protocol import (
    HUB,
    Ability,
    Agent,
    Hub,
    Message,
    MessageError,
    Protocol,
    RecipeError,
    generator,
    nearest,
    setting,
)  # fmt: skip
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
        own, held = own_representations(me, self.average_over, self.uploads, *bounds)
        if not me.topology.hub:
            heard = await me.exchange({"observations": own[1:], "held": held} if held.any() else None)
            keep_observations(me, heard, own.shape[2])
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
                l_disc = contrast(f.log_softmax(dim=1), label, log_q[m], known[m], mean=self.pairs == "mean")
                loss = loss + self.disc_weight * l_disc
            me.learner.descend(loss)

    def _received(self, me: Agent, t: int) -> tuple[np.ndarray, np.ndarray]:
        """(1 + M, C, d): t̄ and the observations for this round; (1 + M, C): which there are, and not too old."""
        nothing = np.zeros((1, me.classes, 1), np.float32), np.zeros((1, me.classes), dtype=bool)
        if me.topology.hub:
            last = me.state.get("relayed")
            if last is None:  # Algorithm 1: {t̄^c} and {t_m^c} are initialised randomly, the same for all agents
                random = self.start == "random" and t == 0 and len(me.roster) > 1
                return random_representations(me, self.downloads) if random else nothing
            age = last["age"] + np.where(last["age"] < 0, 0.0, me.time - last["time"])
            return last["representations"], (age >= 0) & (age <= (self.oldest or np.inf))
        heard = recent(me.state.get("heard", {}), me.time, self.oldest)
        used = [each for name, each in heard.items() if self.listen_to is None or name in self.listen_to]
        if not any(len(each["observations"]) for each in used):
            return nothing
        # Without a hub, the mean of the observations that were received stands for t̄.
        received, age = drawn_representations(me.rng("draw"), used, self.downloads, me.time)
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
            features = me.joined[sender].features if sender in me.joined else None
            if accepts_representations(me, sender, message, "representations", features, 1 + _MOST):
                own, held = message["representations"], message["held"]
                uploads[sender] = {"mean": own[0], "observations": own[1:], "held": held, "time": me.time}
            return None
        if not me.accepts(sender, message, {"downloads": int, "oldest": float, "listen_to": list}):
            return Message()
        used = recent(uploads, me.time, message["oldest"] or None)
        wanted = [name for name in used if name == sender or not message["listen_to"] or name in message["listen_to"]]
        others = [used[name] for name in wanted if name != sender]
        if not others:
            return Message()
        means, held = (np.stack([used[name][key] for name in wanted]) for key in ("mean", "held"))
        aggregation = parts.Aggregation(kind=self.aggregate, trim=self.trim, outputs=False, hub=me)
        mean = mean_representations(means, held, aggregation)  # t̄^c
        count = min(max(message["downloads"], 0), _MOST)
        received, age = drawn_representations(me.rng("draw", sender), others, count, me.time, mean)
        return Message.of(representations=received, age=age)

    def check(self, agents: Sequence[Agent]) -> None:
        """There must be classes, and features of one dimension that are not the samples themselves."""
        parts.check_features(agents, self.name, by_class=True)
        parts.check_head(agents, self.name)
        check_sharing(agents, self)


# --- the contrast L_disc


def contrast(
    log_p: torch.Tensor, labels: torch.Tensor, log_q: torch.Tensor, known: torch.Tensor, *, mean: bool = True
) -> torch.Tensor:
    """The mean over samples of ℓ_disc(1, s_i, t^y_i) + Σ_{c ≠ y_i} ℓ_disc(0, s_i, t^c), ℓ_disc: -log h or -log (1 - h).

    `log_p` (B, K): of the samples s_i; `log_q` (B, C, K): of one t^c for each class and sample; `known` (B, C): which
    of them there are, the others are left out. `mean`: over the pairs of a sample, instead of their sum.
    """
    same = torch.nn.functional.one_hot(labels, log_q.shape[1]).bool()
    p = log_p[:, None, :]
    losses = -torch.where(same, log_same_class(p, log_q), log_other_class(p, log_q))
    kept = losses.masked_fill(~known, 0.0).sum(dim=1)
    return (kept / known.sum(dim=1).clamp(min=1) if mean else kept).mean()


def log_same_class(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log h, h = ⟨p, q⟩ = Σ_k p_k q_k: the probability that samples with class probabilities p, q are of one class."""
    return torch.logsumexp(log_p + log_q, dim=-1)


def log_other_class(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log (1 - h) = log Σ_k p_k (1 - q_k), finite where h rounds to 1."""
    return torch.logsumexp(log_p + log_complement(log_q), dim=-1)


def log_complement(log_q: torch.Tensor) -> torch.Tensor:
    """log (1 - q_k) for each class k of normalised log-probabilities.

    Only the likeliest class can have q_k near 1, where 1 - q_k loses its digits; there it is the sum of all others.
    """
    likeliest = torch.nn.functional.one_hot(log_q.argmax(dim=-1), log_q.shape[-1]).bool()
    others = torch.logsumexp(log_q.masked_fill(likeliest, -torch.inf), dim=-1, keepdim=True)
    # masked_fill before the logarithm too: what is not taken must have a finite gradient.
    direct = torch.log1p(-log_q.masked_fill(likeliest, -1.0).exp())
    return torch.where(likeliest, others, direct)


# --- mean features by class


def own_representations(
    me: Agent,
    average_over: int,
    observations: int,
    classes: Sequence[int] | None = None,
    share: float = 1.0,
    smallest: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """(1 + M, C, d): the mean features of each class, then M observations of it; (C,): which classes there are.

    An observation is the mean over `average_over` samples of a class drawn at random, or all if there are fewer.
    `classes`: those that are released, None for all; `share`: of the samples that are used, always the same ones.
    `smallest`: samples of a class that is released, of an observation, and of what an observation leaves out of the
    class: the mean of the class and an observation of all but one sample would give that one.
    """
    rows = np.arange(len(me.shard))
    if share < 1.0:
        order = generator(me.seed, me.name, "released").permutation(len(me.shard))
        rows = np.sort(order[: int(np.ceil(share * len(order)))])
    label, rng = me.shard.targets[rows].argmax(axis=1), me.rng("observations")
    features = me.learner.evaluated_features(me.shard.x[rows]) if len(rows) else np.zeros((0, 1), np.float32)
    own = np.zeros((1 + observations, me.classes, features.shape[1]), np.float32)
    held = parts.named_classes(me, np.bincount(label, minlength=me.classes), smallest, classes)
    for c in np.flatnonzero(held):
        of_class, count = features[label == c], max(average_over, smallest)
        own[0, c] = of_class.mean(axis=0)
        if len(of_class) - count < smallest:
            count = len(of_class)
        for m in range(observations):
            own[1 + m, c] = of_class[rng.permutation(len(of_class))[:count]].mean(axis=0)
    return own, held


def random_representations(me: Agent, observations: int) -> tuple[np.ndarray, np.ndarray]:
    """(1 + M, C, d): standard normal, the same for all agents of a run; (1 + M, C): there is one of each."""
    shape = 1 + observations, me.classes, int(me.learner.head.in_features)
    drawn = generator(me.seed, "initial representations").standard_normal(shape).astype(np.float32)
    return drawn, np.ones(shape[:2], dtype=bool)


def mean_representations(
    values: np.ndarray, held: np.ndarray, aggregation: parts.Aggregation | None = None
) -> np.ndarray:
    """(C, d): for each class the mean, or another aggregate, of the rows of (K, C, d) that hold it; else zeros."""
    if aggregation is None or aggregation.kind == "mean":
        sums = np.einsum("kcd,kc->cd", values, held, dtype=np.float64)
        return np.asarray(sums / np.maximum(held.sum(axis=0), 1)[:, None], dtype=np.float32)
    means = np.zeros(values.shape[1:], np.float32)
    for c in np.flatnonzero(held.any(axis=0)):
        means[c] = aggregation.of_all(values[held[:, c], c][:, None, :])[0]
    return means


def recent(given: Mapping[str, Mapping[str, Any]], now: float, oldest: float | None) -> dict[str, Mapping[str, Any]]:
    """What was sent no longer ago than `oldest`, by sender; None: at any time."""
    return {name: each for name, each in given.items() if oldest is None or now - each["time"] <= oldest}


def drawn_representations(
    rng: np.random.Generator,
    given: Sequence[Mapping[str, Any]],
    count: int,
    now: float,
    mean: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(1 + M, C, d): t̄, and M = `count` observations of each class at random; (1 + M, C): their ages, -1: no such one.

    `given`: of each sender its "observations" (m, C, d), which classes it "held" (C,) and at which "time" they came.
    The observations of a class are different ones, if there are enough. `mean`: t̄, if not the mean of all of them.
    """
    observed = np.concatenate([each["observations"] for each in given])
    sizes = [len(each["observations"]) for each in given]
    held = np.repeat(np.stack([each["held"] for each in given]), sizes, axis=0)
    ages = np.repeat([now - each["time"] for each in given], sizes)
    drawn = np.zeros((1 + count, *observed.shape[1:]), np.float32)
    age = np.full((1 + count, observed.shape[1]), -1.0, np.float32)
    drawn[0] = mean_representations(observed, held) if mean is None else mean
    age[0, np.any([each["held"] for each in given], axis=0)] = max(now - each["time"] for each in given)
    for c in np.flatnonzero(held.any(axis=0)) if count else ():
        holders = np.flatnonzero(held[:, c])
        rows = rng.choice(holders, count, replace=len(holders) < count)
        drawn[1:, c], age[1:, c] = observed[rows, c], ages[rows]
    return drawn, age


def keep_observations(me: Agent, heard: Mapping[str, Message], features: int) -> None:
    """Between neighbours: the last observations of each, in place of those before."""
    kept = me.state.setdefault("heard", {})
    for name, message in heard.items():
        if message and accepts_representations(me, name, message, "observations", features, _MOST):
            kept[name] = {"observations": message["observations"], "held": message["held"], "time": me.time}


def accepts_representations(
    me: Agent | Hub, sender: str, message: Message, array: str, features: int | None, most: int
) -> bool:
    """Whether a message holds means of features by class, at most `most` of each, and which classes it has."""
    expect: dict[str, Any] = {array: (None, me.classes, features), "held": np.empty(me.classes, bool)}
    if not me.accepts(sender, message, expect):
        return False
    found = message[array]
    if found.dtype == np.float32 and len(found) <= most:
        return True
    me.refuse(
        sender,
        MessageError(
            f"'{array}' must be at most {most} means of each class, as float32.",
            f"{len(found)}, as {found.dtype}",
            "The sender must run the same protocol.",
        ),
    )
    return False


# --- what an agent chooses


def check_sharing(agents: Sequence[Agent], protocol: CRS) -> None:
    """Whom an agent listens to, which classes it releases, and how old knowledge may be: each must leave some."""
    for agent in agents:
        mine = protocol.chosen(agent.choices)
        if mine.listen_to is not None:
            _check_listening(agent, mine.listen_to, chosen="listen_to" in agent.choices)
        beyond = [c for c in mine.release_classes or () if c >= agent.classes]
        if beyond:
            raise RecipeError(
                f"release_classes of agent '{agent.name}' must be classes of the federation, 0 to {agent.classes - 1}.",
                f"{beyond[0]}",
                "Correct it, or leave release_classes out: all classes.",
            )
        if mine.oldest is not None and mine.oldest < 1 and not agent.asynchronous:
            raise RecipeError(
                f"oldest of agent '{agent.name}' must be at least 1 with rounds: what is used is of an earlier round.",
                f"{mine.oldest:g}",
                "Set 1 or more, or leave it out: any age.",
            )


def _check_listening(agent: Agent, listen_to: Sequence[str], *, chosen: bool) -> None:
    """Every name is an agent, and somebody is left; in one's own choice, everybody named is heard, and not oneself."""
    others = [name for name in agent.roster if name != agent.name]
    heard = others if agent.topology.hub else list(agent.topology.sources(agent.name))
    for name in listen_to:
        if name not in agent.roster or (chosen and name not in heard):
            is_own = "itself, " * (name == agent.name)
            raise RecipeError(
                f"listen_to of agent '{agent.name}' must name other agents that it hears.",
                f"{is_own}'{name}'",
                nearest(name, heard) if heard else "Leave it out: it hears nobody.",
            )
    if not set(listen_to) & set(heard):
        raise RecipeError(
            f"listen_to of agent '{agent.name}' must name an agent that it hears.",
            ", ".join(map(repr, listen_to)) or "an empty list",
            f"Name some of {', '.join(heard) or 'nobody'}, or leave it out: all. To send without learning, set "
            "kd_weight and disc_weight to 0.",
        )
