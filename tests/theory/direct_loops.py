"""The paper's algorithms as plain loops: fit = solve, predict = Gram matrix. Nothing of codistill is used."""

from __future__ import annotations

import numpy as np


def linear(x, z):
    return x @ z.T


def rbf(gamma):
    return lambda x, z: np.exp(-gamma * ((x[:, None] - z[None]) ** 2).sum(-1))


def laplacian(gamma):
    return lambda x, z: np.exp(-gamma * np.abs(x[:, None] - z[None]).sum(-1))


def polynomial(gamma, degree, coef0):
    return lambda x, z: (gamma * x @ z.T + coef0) ** degree


class Machine:
    """A kernel ridge machine: min 1/N Σ (g(x) - y)² + c ‖g‖², or least norm at c = 0."""

    def __init__(self, kernel, x, c, n):
        self.kernel, self.x, self.c, self.n = kernel, x, c, n

    def fit(self, labels):
        gram = self.kernel(self.x, self.x)
        if self.c == 0:
            a = np.linalg.lstsq(gram, labels, rcond=1e-11)[0]
        else:
            a = np.linalg.solve(gram + self.c * self.n * np.eye(len(self.x)), labels)
        return lambda z: self.kernel(z, self.x) @ a


def machines(xs, kernels, c, own_count=False):
    n = sum(map(len, xs))
    return [Machine(k, x, c, len(x) if own_count else n) for x, k in zip(xs, kernels, strict=True)]


def chain(ms, labels, t, start=0):
    """AKD: the model after t hand-overs."""
    agent, model = start, ms[start].fit(labels)
    for _ in range(t):
        agent = (agent + 1) % len(ms)
        model = ms[agent].fit(model(ms[agent].x))
    return model


def averaging(ms, ys, t, w=None, current=False):
    """AvgKD, or PKD with the current labels: all agents' models in round t."""
    w = 1 / len(ms) if w is None else w
    labels = [y.copy() for y in ys]
    for _ in range(t):
        models = [m.fit(u) for m, u in zip(ms, labels, strict=True)]
        new = []
        for i, m in enumerate(ms):
            others = [g(m.x) for j, g in enumerate(models) if j != i]
            new.append(w * (labels[i] if current else ys[i]) + (1 - w) * sum(others) / len(others))
        labels = new
    return [m.fit(u) for m, u in zip(ms, labels, strict=True)]


def ensemble(ms, ys, t, z, half=False):
    """EKD, eq. (9) and (32): the partial sum up to t, at inputs z."""
    total = 0
    for i in range(t + 1):
        weight = 0.5 if half and i == t else 1
        total = total + weight * (-1) ** i * sum(chain(ms, y, i, start)(z) for start, y in enumerate(ys))
    return total


def backfit(ms, ys, sweeps, z, damping=None):
    """Gauss-Seidel from nothing; with damping, Jacobi on the labels that are fitted, from one's own."""
    labels = [np.zeros_like(y) if damping is None else y.copy() for y in ys]
    for _ in range(sweeps):
        models = [m.fit(u) for m, u in zip(ms, labels, strict=True)]
        old = [u.copy() for u in labels]
        for i, m in enumerate(ms):
            residual = ys[i] - sum(g(m.x) for j, g in enumerate(models) if j != i)
            if damping is None:
                labels[i] = residual
                models[i] = m.fit(residual)
            else:
                labels[i] = old[i] + damping * (residual - old[i])
    return sum(m.fit(u)(z) for m, u in zip(ms, labels, strict=True))


def pooled(xs, ys, kernel, c):
    """One machine of everybody's data."""
    x = np.concatenate(xs)
    return Machine(kernel, x, c, len(x)).fit(np.concatenate(ys))


def off(found, expected):
    """Relative distance; of zero, the distance."""
    size = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / (size or 1.0))
