"""A hospital with a table of patients and a random forest. The table is not sent anywhere."""

from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

import codistill as cd

HERE = Path(__file__).parent
accepts = ("fedmd", "avgkd")  # the only protocols that this agent accepts


def agent(name):
    """The model and the data, with a fifth held out as test data."""
    table = pd.read_csv(HERE / "patients.csv")
    x, y = table.drop(columns="malignant").to_numpy(), table["malignant"].to_numpy()
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    return cd.Agent(name, RandomForestClassifier(n_estimators=200), x, y, test=(x_test, y_test))


def public():
    """The public samples of all nodes: the same columns in the same order, without the label."""
    return np.load(HERE / "public.npy")


def finished(agent):
    """Called once, when the run is over, with the trained model in agent.learner."""
    x, y = agent.test
    right = agent.learner.predict(x).argmax(axis=1) == y
    print(f"{agent.name}: {right.mean():.1%} of {len(y)} own test samples")
