"""Three agents learn from raw texts: a transformer of Hugging Face, and two linear models on counts of words.

Public and test data are the texts themselves. Each agent turns them into what its model takes: the transformer gets the
token ids of a tokenizer that is trained on its own texts, the linear models get theirs from a vectoriser.
"""

from __future__ import annotations

import random

import torch
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

import codistill as cd

# Notes of three wards: what is seen, in the words of that ward, and what is done.
SEEN = {
    "heart": ("chest pain", "palpitations", "a murmur", "swollen ankles", "an irregular pulse", "high blood pressure"),
    "lung": ("a dry cough", "wheezing", "shortness of breath", "crackles", "a low saturation", "green sputum"),
    "bone": ("a swollen knee", "hip pain", "a stiff shoulder", "a broken wrist", "back pain", "a sprained ankle"),
}
DONE = {
    "heart": ("an echocardiogram", "a beta blocker", "a troponin test", "a stress test"),
    "lung": ("an inhaler", "spirometry", "oxygen", "a chest film"),
    "bone": ("a plaster cast", "an x-ray of the joint", "physiotherapy", "a crutch"),
}
FORMS = (
    "patient reports {seen} since {day}, {done} ordered",
    "{seen} on admission; no fever; plan: {done}",
    "seen on {day} with {seen}, {done} helped",
    "follow-up: {seen} is better after {done}",
)
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday")


def notes(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Texts, and the ward that each is from. One word in five of the findings is of another ward."""
    draw = random.Random(seed)
    texts, wards = [], []
    for _ in range(count):
        ward = draw.choice(list(SEEN))
        seen = draw.choice(SEEN[draw.choice(list(SEEN)) if draw.random() < 0.2 else ward])
        texts.append(draw.choice(FORMS).format(seen=seen, day=draw.choice(DAYS), done=draw.choice(DONE[ward])))
        wards.append(ward)
    return texts, wards


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of words, trained on an agent's own texts."""
    made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def transformer_agent(name: str, texts: list[str], wards: list[str]) -> cd.Agent:
    """An agent with a small sequence classifier, randomly initialised."""
    tokenizer = tokenizer_of(texts)

    def tokens(given):
        encoded = tokenizer(list(given), padding="max_length", truncation=True, max_length=16)
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}

    torch.manual_seed(0)
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 16}
    config = DistilBertConfig(vocab_size=len(tokenizer), num_labels=3, **sizes)
    module = DistilBertForSequenceClassification(config)
    learner = cd.TorchLearner(module, optimiser="adamw", lr=3e-3, weight_decay=0.01)
    return cd.Agent(name, learner, texts, wards, prepare=FunctionTransformer(tokens))


def main() -> None:
    agents = [
        transformer_agent("transformer", *notes(120, seed=1)),
        cd.Agent("tf-idf", make_pipeline(TfidfVectorizer(), LogisticRegression()), *notes(30, seed=2)),
        cd.Agent("counts", make_pipeline(CountVectorizer(), MultinomialNB()), *notes(30, seed=3)),
    ]
    public, _ = notes(200, seed=4)  # no labels
    federation = cd.Federation(agents, cd.FedMD(local_epochs=2), public=public, test=notes(300, seed=5), seed=0)
    result = federation.run(rounds=5, progress=False)
    print(result)
    for agent in result.agents.values():
        print(f"{agent.name}: {agent.predict(['wheezing at night, an inhaler given'])[0]}")
    gains = [line.gain or 0.0 for line in result.summary().lines()]
    assert min(gains) > 0, f"each agent should learn from the others, but they gained {gains}"


if __name__ == "__main__":
    main()
