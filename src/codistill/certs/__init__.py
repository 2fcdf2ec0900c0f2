"""The certificate authority of a federation."""

import importlib.util

from codistill.core.errors import NetworkError

if importlib.util.find_spec("cryptography") is None:
    raise NetworkError(
        "Certificates need the package 'cryptography'.",
        "it is not installed",
        "Install it: pip install 'codistill[network]'",
    )
