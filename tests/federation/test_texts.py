"""A sequence classifier of transformers and a pipeline with a vectoriser, on the same raw texts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import get_tags
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast
from transformers.models.distilbert import DistilBertModel

import codistill as cd
from codistill.core.errors import DataError, LearnerError
from codistill.wire.message import Message

# What peft asks of this version of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")
WORDS = {"heart": ["pulse", "murmur", "chest"], "lung": ["cough", "wheeze", "sputum"]}
LENGTH = 6


def texts(count: int, seed: int) -> tuple[list[str], list[str]]:
    draw = np.random.default_rng(seed)
    kinds = draw.choice(list(WORDS), count).tolist()
    return [f"the {draw.choice(WORDS[kind])} and {draw.choice(WORDS[kind])} today" for kind in kinds], kinds


TRAIN, MORE = texts(40, 1), texts(20, 2)
PUBLIC, TEST = texts(30, 3)[0], texts(40, 4)


def tokens_of(given: list[str], **options: Any) -> FunctionTransformer:
    made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(given, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    options = {"padding": "max_length", "max_length": LENGTH, "truncation": True} | options
    names = ("input_ids", "attention_mask")
    return FunctionTransformer(lambda each: {name: tokenizer(list(each), **options)[name] for name in names})


def classifier(seed: int = 0, **options: Any) -> DistilBertForSequenceClassification:
    torch.manual_seed(seed)
    options |= {"vocab_size": 16, "dim": 8, "hidden_dim": 16, "n_layers": 1, "n_heads": 2, "num_labels": 2}
    return DistilBertForSequenceClassification(DistilBertConfig(**options, max_position_embeddings=LENGTH))


def learner(module: torch.nn.Module | None = None, **options: Any) -> cd.TorchLearner:
    return cd.TorchLearner(module or classifier(), **{"optimiser": "adamw", "lr": 0.01, "weight_decay": 0.1} | options)


def federation(protocol: cd.Protocol | None = None) -> cd.Federation:
    agents = [
        cd.Agent("tokens", learner(), *TRAIN, prepare=tokens_of(TRAIN[0])),
        cd.Agent("words", make_pipeline(TfidfVectorizer(), LogisticRegression()), *MORE),
    ]
    return cd.Federation(agents, protocol or cd.FedMD(local_epochs=2, batch_size=8), public=PUBLIC, test=TEST)


def told(result: Any) -> list[Any]:
    return [result.rows, [agent.predict_proba(TEST[0]).tolist() for agent in result.agents.values()]]


@pytest.fixture(scope="module")
def whole() -> Any:
    return federation().run(3, runtime="simulation", progress=False)


def test_both_learn_from_raw_texts(whole: Any) -> None:
    accuracies = {row["agent"]: row["accuracy"] for row in whole.rows}
    assert min(accuracies.values()) > 0.9
    for agent in whole.agents.values():
        assert agent.predict(["the pulse and chest today", "a new sputum"]).tolist() == ["heart", "lung"]
        assert agent.predict(pd.Series(TEST[0])).tolist() == agent.predict(TEST[0]).tolist()
        assert agent.predict_proba(TEST[0][:0]).shape == (0, 2)
        assert agent.score(*TEST) == accuracies[agent.name]
        assert "<tr><th>samples</th><td>texts</td></tr>" in agent._repr_html_()
        assert get_tags(agent).input_tags.string


def test_it_is_the_same_in_worker_processes_and_after_a_stop(whole: Any, tmp_path: Path) -> None:
    """With dropout in each round, and moments of AdamW that live across rounds."""

    class Stop:
        def round_ended(self, ended: Any) -> bool:
            return True

    assert told(federation().run(3, runtime="processes", progress=False)) == told(whole)
    federation().run(3, runtime="simulation", progress=False, folder=tmp_path / "run", observers=[Stop()])
    resumed = federation().run(3, runtime="simulation", progress=False, folder=tmp_path / "run", resume=True)
    assert told(resumed)[1] == told(whole)[1]


def test_the_model_gets_whole_numbers_by_name_and_trains_in_training_mode() -> None:
    seen: list[dict[str, Any]] = []
    agent = cd.Agent("a", learner(), *TRAIN, prepare=tokens_of(TRAIN[0]))
    module = agent.learner.module
    module.register_forward_pre_hook(lambda part, given, named: seen.append(named), with_kwargs=True)
    cd.Federation([agent], cd.Alone(), test=TEST)
    x = agent.shard.x
    assert x.shape == (40, 2 * LENGTH)
    (batch,) = agent.shard.batches(0, 40)
    seen.clear()
    torch.manual_seed(0)
    trained = agent.learner(batch.x)
    assert {name: (each.dtype, tuple(each.shape)) for name, each in seen[0].items()} == {
        "input_ids": (torch.int64, (40, LENGTH)), "attention_mask": (torch.int64, (40, LENGTH)),
    }  # fmt: skip
    torch.manual_seed(0)
    assert torch.equal(agent.learner(batch.x), trained)  # dropout is drawn from torch's generator
    assert not torch.equal(agent.learner(batch.x), trained)
    assert np.array_equal(agent.learner.predict(x), agent.learner.predict(x))  # and off in predictions
    with torch.no_grad():
        given = {name: torch.tensor(each) for name, each in tokens_of(TRAIN[0]).transform(TRAIN[0]).items()}
        expected = torch.softmax(module(**given).logits, dim=1).numpy()
    assert np.array_equal(agent.learner.predict(x), expected)


def test_a_tokenizer_that_pads_to_the_longest_text_is_refused() -> None:
    agent = cd.Agent("a", learner(), *TRAIN, prepare=tokens_of(TRAIN[0], padding="longest", max_length=None))
    with pytest.raises(DataError, match="pad them to one length"):
        cd.Federation([agent], cd.Alone(), test=(["pulse"], ["heart"]))


def test_a_model_of_token_ids_is_saved_and_loaded(tmp_path: Path) -> None:
    x = tokens_of(TRAIN[0]).transform(TRAIN[0])
    agent = cd.Agent("a", learner(), x, TRAIN[1])
    trained = cd.Federation([agent], cd.Alone()).run(1, runtime="simulation", progress=False).agents["a"]
    trained.save(tmp_path / "model")
    assert np.array_equal(cd.load(tmp_path / "model", model=classifier(9)).predict_proba(x), trained.predict_proba(x))
    with pytest.raises(LearnerError, match=r"can only be loaded into a model of that class.*model="):
        cd.load(tmp_path / "model")


def test_with_plain_attention_it_travels_and_is_opened_by_the_file_alone(tmp_path: Path) -> None:
    """As ONNX, which has no infinity: the other attention masks tokens by it."""
    x = tokens_of(TRAIN[0]).transform(TRAIN[0])
    agents = [cd.Agent(name, learner(classifier(attn_implementation="eager")), x, TRAIN[1]) for name in "ab"]
    result = cd.Federation(agents, cd.AvgKD()).run(1, runtime="simulation", progress=False, alone=False)
    assert result.events == []
    expected = result.agents["a"].predict_proba(x)
    loaded = cd.load(result.agents["a"].save(tmp_path / "model"))
    np.testing.assert_allclose(loaded.predict_proba(x), expected, atol=1e-5)
    with pytest.raises(LearnerError, match="NaN or infinity in its weights"):
        cd.Federation([cd.Agent(name, learner(), x, TRAIN[1]) for name in "ab"], cd.AvgKD())


# --- where it starts


def test_a_fresh_start_is_that_of_the_library() -> None:
    made = learner()
    torch.manual_seed(3)
    made.reset()
    weights = made.weights()
    assert 0.01 < weights["pre_classifier.weight"].std() < 0.03  # initializer_range: 0.02
    assert not weights["distilbert.embeddings.word_embeddings.weight"][0].any()  # of the padding
    assert not weights["classifier.bias"].any()
    other = learner(classifier(8))
    torch.manual_seed(3)
    other.reset()
    assert all(np.array_equal(weights[name], array) for name, array in other.weights().items())


def test_what_was_read_from_a_file_is_where_it_starts(tmp_path: Path) -> None:
    classifier(7).distilbert.save_pretrained(tmp_path)
    body = DistilBertModel.from_pretrained(tmp_path).state_dict()
    made = learner(DistilBertForSequenceClassification.from_pretrained(tmp_path, num_labels=2))
    twin = copy.deepcopy(made)
    head = made.weights()["classifier.weight"]
    made.predict(np.ones((2, LENGTH), np.float32))  # which shows that it takes whole numbers
    made.fit(np.ones((40, LENGTH), np.float32), np.eye(2)[[0, 1] * 20])
    for each in (made, twin):
        torch.manual_seed(1)
        each.reset()
        weights = each.weights()
        assert all(np.array_equal(weights[f"distilbert.{name}"], body[name].numpy()) for name in body)
        assert not np.array_equal(weights["classifier.weight"], head)  # it was not in the file
    assert np.array_equal(made.weights()["classifier.weight"], twin.weights()["classifier.weight"])


# --- LoRA


def lora(base: int = 0, adapter: int = 0) -> torch.nn.Module:
    module = classifier(base)
    torch.manual_seed(adapter)
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["q_lin", "v_lin"])
    made: torch.nn.Module = get_peft_model(module, config)
    return made


def lora_federation(modules: list[torch.nn.Module], sent: list[int]) -> cd.Federation:
    agents = [
        cd.Agent(name, learner(module), *data, prepare=tokens_of(TRAIN[0]))
        for name, module, data in zip("ab", modules, (TRAIN, MORE), strict=True)
    ]
    return cd.Federation(agents, cd.FedAvg(), watchers=[lambda sender, receiver, data: sent.append(len(data))])


def test_of_lora_the_adapters_and_the_head_are_averaged_and_nothing_else_is_sent() -> None:
    sent: list[int] = []
    modules = [lora(0, 1), lora(0, 2)]
    before = copy.deepcopy(modules[0].state_dict())
    made = lora_federation(modules, sent)
    result = made.run(2, runtime="simulation", progress=False, alone=False)
    first, second = (agent.learner for agent in made.agents)
    shared = first.weights()
    assert {name.split(".")[-3] for name in shared} >= {"lora_A", "lora_B"}
    assert all("lora_" in name or "classifier" in name for name in shared)
    assert all(np.array_equal(array, second.weights()[name]) for name, array in shared.items())
    assert any(array.any() for name, array in shared.items() if "lora_B" in name)
    after = first.module.state_dict()
    assert all(torch.equal(each, after[name]) for name, each in before.items() if name not in shared)
    everything = sum(each.numel() * each.element_size() for each in before.values())
    upload = len(Message(shared, {"samples": 40}).encoded)
    assert max(sent) == upload < everything / 2
    assert result.agents["a"].predict(["a wheeze"]).shape == (1,)
    other = lora_federation([lora(0, 1), lora(0, 2)], []).run(2, runtime="processes", progress=False, alone=False)
    assert [each.predict_proba(TEST[0]).tolist() for each in other.agents.values()] == [
        each.predict_proba(TEST[0]).tolist() for each in result.agents.values()
    ]


def test_adapters_start_without_an_effect_on_the_same_base() -> None:
    made = learner(lora(0, 1))
    weights = made.module.state_dict()
    kept = {name: each.clone() for name, each in weights.items() if name not in made.weights()}
    torch.manual_seed(4)
    made.reset()
    drawn = made.weights()
    assert not any(array.any() for name, array in drawn.items() if "lora_B" in name)
    assert all(array.all() for name, array in drawn.items() if "lora_A" in name)
    assert all(torch.equal(each, made.module.state_dict()[name]) for name, each in kept.items())


def test_adapters_of_other_bases_are_refused() -> None:
    with pytest.raises(LearnerError, match="agents 'a' and 'b' have frozen weights of different values"):
        lora_federation([lora(0), lora(1)], [])
