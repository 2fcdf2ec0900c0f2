"""Models that travel in messages: never pickled, never executed.

| kind of message | module | what travels |
|---|---|---|
| `torch` | `torch_models` | name and options of a registered architecture, weights |
| `onnx` | `onnx_models` | any other torch module, or an object with `to_onnx()` |
| `skops` | `sklearn_models` | a fitted scikit-learn estimator of a listed type, which holds no training rows |
| `kernel` | `kernel_models` | inputs and coefficients, if their owner agrees |
| `trees` | `boosted_models`, `tree_ensemble` | the trees of XGBoost and LightGBM, as arrays |
| `constant` | `constant_models` | class frequencies, of a model that could not be fitted yet |

`open_model` checks what arrives before it is built and before it is used, and returns a predictor or raises
`MessageError`. `archive_reading` reads estimators, also of saved models, as plain data before anything compiled is
built. `model_limits` says how much a model may compute and hold. `estimator_state` is for an agent's own checkpoints.
"""

from codistill.learners.portable.receiving import ReceivedModel, checked_predictions, open_model

__all__ = ["ReceivedModel", "checked_predictions", "open_model"]
