"""How one agent prepares samples for its model: by its own training samples, which no other agent sees."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np

from codistill.data.named_options import Naming, by_number
from codistill.data.validation import check_finite
from codistill.errors import CodistillError, DataError

_CODES = 10  # a column of at most so many different values holds codes: it is filled by the most frequent one


class Preparation:
    """An optional transformer, and filled-in missing values for a model that does not take them."""

    def __init__(self, transformer: Any, *, takes_missing: bool, owner: str) -> None:
        for method in ("fit", "transform"):
            if transformer is not None and not callable(getattr(transformer, method, None)):
                raise DataError(
                    f"prepare of {owner} must be a scikit-learn transformer.",
                    f"{transformer!r}"[:80],
                    "Pass for example sklearn.preprocessing.StandardScaler().",
                )
        # A copy: one transformer that is given to several agents is fitted by each of them.
        self.transformer, self.takes_missing, self._owner = copy.deepcopy(transformer), takes_missing, owner
        self._naming = Naming(owner)  # of the samples that it was fitted to
        self._training = np.empty((0, 0))  # prepared, as far as the transformer goes
        self._fill: np.ndarray | None = None  # computed when a value is missing

    @classmethod
    def fitted(cls, transformer: Any, fill: np.ndarray | None, *, takes_missing: bool, owner: str) -> Preparation:
        """One that needs no training samples any more; `fill` as `fill_values` returned it."""
        made = cls(transformer, takes_missing=takes_missing, owner=owner)
        made._fill = fill
        return made

    def fill_values(self) -> np.ndarray | None:
        """What a missing value of each feature is filled in with; None where none is: images, before `fit`."""
        if self._fill is None and self._training.ndim == 2 and len(self._training):
            self._fill = _fill_values(self._training)
        return self._fill

    def fit(self, x: np.ndarray, naming: Naming | None = None) -> np.ndarray:
        """Fit to the agent's training samples, and return them prepared; `naming`: what their columns are called."""
        if self.transformer is not None:
            self._naming = naming or self._naming
            x = self._transformed(x, self._naming)
        self._training, self._fill = x, None
        return x if self.takes_missing else self.complete(x)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Samples as the agent's model takes them; those that need no preparation are returned as they are."""
        if self.transformer is not None:
            x = self._transformed(x)
        return x if self.takes_missing else self.complete(x)

    def complete(self, x: np.ndarray) -> np.ndarray:
        """Prepared samples with every missing value filled in: by the median or most frequent value of the column."""
        if x.ndim != 2 or not np.isnan(x).any():
            return x
        fill = self.fill_values()
        return x if fill is None else np.where(np.isnan(x), fill, x).astype(x.dtype)

    def _transformed(self, x: np.ndarray, fitting: Naming | None = None) -> np.ndarray:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a column that is empty here has no mean
                if fitting is not None:
                    with by_number(self.transformer, fitting, x):
                        self.transformer.fit(x)
                made = self.transformer.transform(x)
            made = made.toarray() if hasattr(made, "toarray") else made
            made = np.ascontiguousarray(made, dtype=np.float32)
        except CodistillError:
            raise
        except Exception as error:  # a transformer may be the operator's own
            raise DataError(
                f"The transformer prepare of {self._owner} must work on its samples.",
                f"{type(error).__name__}: {error}"[:300],
                "Try prepare.fit_transform(x) by itself.",
            ) from error
        if made.ndim != 2 or len(made) != len(x):
            raise DataError(
                f"The transformer prepare of {self._owner} must return one row of numbers per sample.",
                f"shape {made.shape} for {len(x)} samples",
                "Try prepare.fit_transform(x) by itself.",
            )
        check_finite(made, f"the prepared samples of {self._owner}", missing=True)
        return made


def _fill_values(x: np.ndarray) -> np.ndarray:
    """One value per column; 0 for a column without any, which is the mean where columns are standardised."""
    from sklearn.impute import SimpleImputer

    codes = np.array([len(np.unique(column[~np.isnan(column)])) <= _CODES for column in x.T])
    median, frequent = (
        SimpleImputer(strategy=strategy, keep_empty_features=True).fit(x).statistics_
        for strategy in ("median", "most_frequent")
    )
    values: np.ndarray = np.where(codes, frequent, median)
    return values
