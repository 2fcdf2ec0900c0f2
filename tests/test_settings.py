"""Settings: declared once, checked in one place, and every error names what must hold."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import codistill as cd
from codistill.core.errors import RecipeError, nearest
from codistill.core.settings import check_settings, from_table, setting
from codistill.core.spec import RunSpec
from codistill.data.partition import Dirichlet
from codistill.network.options import Network
from codistill.protocols import PROTOCOLS


@dataclass(frozen=True, kw_only=True)
class Oven:
    degrees: float = setting(help="how hot it is", above=0, at_most=300)
    minutes: int = setting(20, "how long it is on", at_least=1)
    mode: str | None = setting(None, "where the heat is from", choices=("fan", "grill"))
    trays: tuple[str, ...] = setting((), "what is inside")
    names: dict[str, str] | None = setting(None, "what they are called")
    light: bool = setting(False, "whether one sees it")
    options: dict = setting(help="anything else", factory=dict)

    def __post_init__(self):
        check_settings(self, "oven")


@pytest.mark.parametrize(
    ("values", "must"),
    [
        ({"degrees": 0}, "oven.degrees must be above 0"),
        ({"degrees": 300.5}, "oven.degrees must be at most 300"),
        ({"degrees": float("nan")}, "oven.degrees must be finite"),
        ({"degrees": float("inf")}, "oven.degrees must be finite"),
        ({"degrees": "hot"}, "oven.degrees must be a number"),
        ({"degrees": True}, "oven.degrees must be a number"),
        ({"degrees": None}, "oven.degrees must be a number"),
        ({"minutes": 0}, "oven.minutes must be at least 1"),
        ({"minutes": 2.0}, "oven.minutes must be an integer"),
        ({"minutes": False}, "oven.minutes must be an integer"),
        ({"mode": "steam"}, "oven.mode must be one of fan, grill"),
        ({"mode": 3}, "oven.mode must be a string or unset"),
        ({"trays": "bread"}, "oven.trays must be a list of strings"),
        ({"trays": ("bread", 3)}, "oven.trays must be a list of strings"),
        ({"names": {"bread": 3}}, "oven.names must be a table of strings or unset"),
        ({"light": 1}, "oven.light must be true or false"),
        ({"options": []}, "oven.options must be a table"),
    ],
)
def test_what_must_hold_is_said(values, must):
    with pytest.raises(RecipeError) as caught:
        Oven(**{"degrees": 200, **values})
    assert caught.value.must.startswith(must)
    name = next(iter(values))
    assert {field.name: field for field in fields(Oven)}[name].metadata["help"] in caught.value.do


def test_of_a_list_the_wrong_item_is_found():
    with pytest.raises(RecipeError) as caught:
        Oven(degrees=200, trays=("bread", 3, "cake"))
    assert caught.value.found == "3"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"degrees": 300},
        {"mode": "fan"},
        {"trays": ("a", "b")},
        {"names": {"a": "b"}},
        {"minutes": 1},
        {"mode": None},
    ],
)
def test_what_holds_is_taken(values):
    oven = Oven(**{"degrees": 200, **values})
    assert all(getattr(oven, name) == value for name, value in values.items())


def test_a_table_is_read_as_toml_writes_it():
    oven = from_table(Oven, {"degrees": 180, "trays": ["bread", "cake"]}, "oven")
    assert type(oven.degrees) is float
    assert oven.trays == ("bread", "cake")
    assert oven.minutes == 20


def test_a_number_that_no_float_holds_is_an_error():
    with pytest.raises(RecipeError, match="oven.degrees must be"):
        from_table(Oven, {"degrees": 10**400}, "oven")


def test_an_unknown_key_names_its_nearest_neighbour():
    with pytest.raises(RecipeError) as caught:
        from_table(Oven, {"degrees": 200, "minuts": 3}, "oven")
    assert (caught.value.must, caught.value.found, caught.value.do) == (
        "Unknown option 'minuts' for [oven].",
        "",
        "Did you mean 'minutes'?",
    )


def test_a_missing_key_is_named_with_its_help():
    with pytest.raises(RecipeError) as caught:
        from_table(Oven, {}, "oven")
    assert "needs 'degrees'" in caught.value.must
    assert "how hot it is" in caught.value.do


@pytest.mark.parametrize(
    ("name", "known", "sentence"),
    [
        ("fedmdd", ["fedavg", "fedmd"], "Did you mean 'fedmd'?"),
        ("zzz", ["fedmd", "avgkd"], "Known: avgkd, fedmd."),
        (3, ["a", "b"], "Known: a, b."),
    ],
)
def test_the_nearest_name(name, known, sentence):
    assert nearest(name, known) == sentence


@given(st.text(max_size=20), st.lists(st.text(max_size=20), max_size=5))
def test_any_unknown_name_gets_a_sentence(name, known):
    sentence = nearest(name, known)
    assert sentence.startswith("Known: ") or any(f"'{other}'" in sentence for other in known)


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=list(PROTOCOLS))
def test_every_hyper_parameter_is_documented(protocol):
    assert protocol.name
    assert protocol.paper
    assert protocol.exchanges
    assert protocol.__doc__
    assert all(field.metadata["help"] for field in fields(protocol))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: cd.FedMD(local_epoch=3),
            "FedMD got an unexpected argument 'local_epoch'. Did you mean 'local_epochs'?",
        ),
        (lambda: cd.FedMD(3), "FedMD takes no positional arguments. Found: 3. Write FedMD(local_epochs=..."),
        (lambda: cd.FedMD(rounds=3), "Pass it to federation.run(rounds=...)."),
        (lambda: cd.FedMD(lr=0.1), "Pass it to the model: codistill.TorchLearner(module, lr=...)."),
        (lambda: RunSpec(round=3), "Did you mean 'rounds'?"),
        (lambda: RunSpec(worker=3), "Did you mean 'workers'?"),
        (lambda: Network(quorm=1.0), "Did you mean 'quorum'?"),
        (lambda: cd.Compression(bit=8), "Did you mean 'bits'?"),
        (lambda: cd.Fault(knd="drop"), "Did you mean 'kind'?"),
        (lambda: Dirichlet(alpa=0.5), "Did you mean 'alpha'?"),
        (lambda: Dirichlet(), "Dirichlet needs the argument 'alpha'. Write Dirichlet(alpha)."),
        (lambda: Dirichlet(0.5, alpha=0.5), "Dirichlet got the argument 'alpha' twice."),
        (lambda: Dirichlet(0.5, 1, False, 2), "Dirichlet takes at most 3 positional arguments. Found: 2."),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_meant(make: Callable[[], object], words: str) -> None:
    with pytest.raises(cd.CodistillError) as caught:
        make()
    assert isinstance(caught.value, TypeError)  # as any other wrong argument in Python
    assert words in str(caught.value)


def test_help_shows_the_arguments_of_a_protocol() -> None:
    assert list(inspect.signature(cd.FedMD).parameters)[:2] == ["local_epochs", "local_steps"]


def test_copies_of_settings_are_equal() -> None:
    assert copy.deepcopy(Dirichlet(0.5)) == Dirichlet(0.5)


def test_one_setting_may_change_the_default_of_others_and_never_what_was_given() -> None:
    """The printed form of CRS has two sums and a random start; FedDF with a discriminator has τ = 15 and LF."""
    printed = cd.CRS(form="printed")
    assert (printed.features, printed.pairs, printed.start) == ("sum", "sum", "random")
    assert cd.CRS(form="printed", pairs="mean").pairs == "mean"
    assert (cd.CRS().features, cd.CRS(form="mean").pairs) == ("mean", "mean")
    assert (cd.FedDF(adversarial=1.0).local_steps, cd.FedDF(adversarial=0.0).local_steps) == (15, 10)
    assert from_table(cd.CRS, {"form": "printed", "start": "none"}, "protocol").start == "none"
