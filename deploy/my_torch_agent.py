"""A hospital with a table of patients and a neural network. The table is not sent anywhere."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import train_test_split

import codistill as cd

HERE = Path(__file__).parent
accepts = ("fedmd", "avgkd")  # the only protocols that this agent accepts


class Scaled(torch.nn.Module):
    """Scales every column to mean 0 and deviation 1 on the public data, so the scale is equal at every agent."""

    def __init__(self, samples):
        super().__init__()
        self.register_buffer("mean", torch.tensor(samples.mean(axis=0), dtype=torch.float32))
        self.register_buffer("deviation", torch.tensor(samples.std(axis=0) + 1e-6, dtype=torch.float32))

    def forward(self, x):
        """Return the scaled samples."""
        return (x - self.mean) / self.deviation


def agent(name):
    """The model and the data, with a fifth held out as test data."""
    table = pd.read_csv(HERE / "patients.csv")
    x, y = table.drop(columns="malignant").to_numpy(), table["malignant"].to_numpy()
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        Scaled(public()), torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
    )
    model = cd.TorchLearner(module, lr=1e-3, optimiser="adam")
    return cd.Agent(name, model, x, y, test=(x_test, y_test))


def public():
    """The public samples of all nodes: the same columns in the same order, without the label."""
    return np.load(HERE / "public.npy")


def finished(agent):
    """Called once, when the run is over, with the trained model in agent.learner."""
    torch.save(agent.learner.module.state_dict(), "model.pt")
