"""Models in probing runs stay in this process: most of the time would go into encoding, checking and opening them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from codistill.agent import Agent
from codistill.learners.ability import Ability
from codistill.learners.portable import ReceivedModel, checked_predictions
from codistill.message import Message


class SentModels:
    """The models that agents of one run have sent. A message holds the number of one, and as many bytes as it has."""

    def __init__(self) -> None:
        self._models: list[Any] = []

    def exporter(self, learner: Any) -> Callable[[], Message]:
        """In place of a learner's `export`, which is called once, for the bytes of a model."""
        export, size = learner.export, 0

        def keep() -> Message:
            nonlocal size
            size = size or len(export().encoded)
            self._models.append(copy.deepcopy(learner))
            return Message.of(model=len(self._models) - 1, bytes=np.zeros(size, dtype=np.uint8))

        return keep

    def get(self, message: Message) -> Any:
        """The model of a message."""
        return self._models[int(message.plain["model"])]


class ProbedAgent(Agent):
    """An agent of a probing run. Its answers are those of any other agent."""

    def __init__(self, agent: Agent, models: SentModels) -> None:
        super().__init__(agent.name, agent.learner, *agent._data, prepare=agent._prepare, choices=agent.choices)
        self._named = agent._named
        self._models = models
        if Ability.PORTABLE in self.learner.abilities:
            self.learner.export = models.exporter(self.learner)  # type: ignore[method-assign]

    def open_model(self, sender: str, message: Message) -> Any:
        """The model in a message, ready to predict on one's own data."""
        model = self._models.get(message)
        if sender == self.name:
            return model
        return ReceivedModel(model, self.shard.x, self.shard.classes, self.prepared.complete)

    def predict_with(self, sender: str, data: bytes, x: np.ndarray) -> np.ndarray:
        """Predictions (n, C) of a model that was received."""
        return checked_predictions(
            self._models.get(Message.decode(data)), x, self.shard.classes, self.prepared.complete
        )
