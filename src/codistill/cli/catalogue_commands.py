"""The commands `protocols` and `learners`: what a recipe can name."""

from __future__ import annotations

import argparse
from typing import Any

from codistill.cli.console import print_table
from codistill.errors import RecipeError, nearest


def add_parsers(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the command line."""
    text = "list all protocols: paper, what is exchanged, which models"
    protocols = commands.add_parser("protocols", help=text, description=text)
    protocols.add_argument("name", nargs="?", help="show one protocol, with its hyper-parameters")
    protocols.set_defaults(command=_protocols)

    text = "list all learners that a recipe can name"
    learners = commands.add_parser("learners", help=text, description=text)
    learners.set_defaults(command=_learners)


def _protocols(options: argparse.Namespace) -> int:
    from codistill.learners.ability import Ability
    from codistill.protocols import PROTOCOLS

    if options.name is not None:
        return _protocol(options.name)
    rows = [
        (p.name, p.paper, p.exchanges, p.needs.words(), "no" if Ability.GRADIENTS in p.needs else "yes")
        for p in PROTOCOLS.values()
    ]
    print_table(("protocol", "paper", "what is exchanged", "ability needed", "black boxes"), rows)
    print("black boxes: models that only fit and predict (forests, boosting, kernels) may take part, also mixed")
    print("One protocol with its hyper-parameters: codistill protocols NAME")
    return 0


def _protocol(name: str) -> int:
    import dataclasses
    import inspect

    from codistill.protocols import PROTOCOLS

    if name not in PROTOCOLS:
        raise RecipeError("The protocol must be a known one.", f"'{name}'", nearest(name, PROTOCOLS))
    print(inspect.cleandoc(PROTOCOLS[name].__doc__ or ""), "\n")
    fields = [
        (field.name, str(field.type), "unset" if field.default is None else str(field.default), field.metadata["help"])
        for field in dataclasses.fields(PROTOCOLS[name])
    ]
    print_table(("hyper-parameter", "type", "default", "what it is"), fields)
    return 0


def _learners(options: argparse.Namespace) -> int:
    from codistill.learners.catalogue import entries

    print_table(("learner", "library", "what it is"), [(e.name, e.library, e.description) for e in entries()])
    print("Any other scikit-learn, XGBoost or LightGBM estimator by its full name, e.g. sklearn.svm.SVC.")
    return 0
