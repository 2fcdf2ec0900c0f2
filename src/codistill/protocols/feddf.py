"""FedDF: weights are averaged among equal architectures, outputs across them; with a discriminator, FedDF-AL."""

from __future__ import annotations

from dataclasses import dataclass

from codistill.learners.ability import Ability
from codistill.protocol import HUB, Agent, Foothold, Hub, Message, setting
from codistill.protocols.adversarial import AdversarialSharing
from codistill.protocols.fedavg import mean_weights, start_alike, with_samples


@dataclass(frozen=True, kw_only=True)
class FedDF(AdversarialSharing):
    """Lin, Kong, Stich, Jaggi. Ensemble Distillation for Robust Model Fusion in Federated Learning. NeurIPS 2020;
    in the form of Han, Shi, Huang. FedAL. Section VI-A, "shareable models".

    A round is τ local steps; then every client sends its weights, and gets the mean of all clients of its own
    architecture (equal names and shapes of weights), weighted by samples; then τ steps of knowledge transfer
    on public data, as in FedMD: so knowledge crosses from one architecture to another. `adversarial` = 1 is
    FedDF-AL, with FedAL's discriminator in the transfer.

    Deviations from Lin et al.: the students are the clients and not the hub, which so needs no architecture,
    and the teachers are the averaged models of all others, among them equal ones of its own group.
    """

    name = "feddf"
    paper = "Lin et al., NeurIPS 2020; Han, Shi, Huang 2023, sec. VI-A"
    exchanges = "weights, and outputs on public data, to and from the hub"
    needs = Ability.WEIGHTS | Ability.GRADIENTS

    local_steps: int | None = setting(10, "τ, gradient steps per round, instead of epochs", at_least=0)
    transfer_steps: int | None = setting(10, "τ, public batches per round; absent: one pass over all", at_least=0)
    adversarial: float = setting(0.0, "weight of U_n, the adversarial loss; 0: without a discriminator", at_least=0)
    synchronise: bool = setting(True, "start agents of equal architecture from the same initial weights")

    async def begin(self, me: Agent) -> None:
        """Equal initial weights for equal architectures, unless told otherwise."""
        if self.synchronise:
            start_alike(me)

    async def round(self, me: Agent, t: int) -> None:
        """Train, take over the mean of one's group, learn from all others."""
        foothold = Foothold(me)
        self._train(me, t, foothold)
        foothold.check()  # weights that are no numbers must not travel
        weights = me.learner.weights()
        mean = await me.ask_hub(Message(weights, {"samples": len(me.shard)}))
        # Empty where one's own weights were lost on the way.
        if mean is not None and mean.arrays and me.accepts(HUB, mean, weights):
            me.learner.load({name: mean[name] for name in weights})
        await self._play(me, t, foothold)
        foothold.check()

    async def hub(self, me: Hub, t: int) -> None:
        """Average weights group by group, then outputs across groups."""
        heard = with_samples(me, await me.gather(expect={"samples": int}))
        groups: dict[tuple[object, ...], dict[str, Message]] = {}
        for name, message in heard.items():
            groups.setdefault(message.signature, {})[name] = message
        # Whose weights were lost on the way is told so, and keeps its own.
        answers = dict.fromkeys(me.present, Message())
        for members in groups.values():
            answers |= dict.fromkeys(members, Message(mean_weights(members)))
        await me.scatter(answers)
        await self._referee(me, t)
