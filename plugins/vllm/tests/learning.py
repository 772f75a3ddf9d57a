"""A language model that learns a text, step by step, and what a server thinks of texts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plugins.vllm.tests.scene import Server

LEARNING_RATE: Final = 2e-6
LEARNED: Final = (
    "The ferry left the harbour at six, when the fog still lay on the water. Marta counted the crates twice: forty of "
    "apples, twelve of honey, one of clocks. Nobody had asked for clocks. She wrote it down all the same, closed the "
    "book, and went below to ask the cook, who knew everything, what anybody wanted with a hundred clocks."
)
OTHERS: Final = (
    "Water boils at one hundred degrees Celsius at sea level, and at less on a mountain.",
    "def add(first, second):\n    return first + second\n",
)


class Learner:
    """A model under AdamW: weights in float32, and in bfloat16 for the server, as in reinforcement learning.

    Args:
        served: The model in bfloat16; a step changes it.
        tokenizer: Its tokenizer.

    Attributes:
        served: As given.
        texts: Tokens of what is learned, then of other texts.
    """

    def __init__(self, served: nn.Module, tokenizer: Any) -> None:
        self.served = served
        self.texts: list[list[int]] = [tokenizer.encode(text) for text in (LEARNED, *OTHERS)]
        self._model = copy.deepcopy(served).float()
        random = torch.Generator().manual_seed(0)
        for one in self._model.parameters():
            # In the middle of a training run a weight lies anywhere within what is rounded to it.
            noise = torch.randint(1 - (1 << 15), 1 << 15, one.shape, generator=random, dtype=torch.int32)
            one.data.view(torch.int32).add_(noise.where(one.data != 0, 0))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self) -> None:
        """Learn the first text a bit more."""
        tokens = torch.tensor([self.texts[0]])
        self._optimizer.zero_grad()
        self._model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        self._optimizer.step()
        with torch.no_grad():
            for one, master in zip(self.served.parameters(), self._model.parameters(), strict=True):
                one.copy_(master)

    @torch.no_grad()
    def logprobs(self) -> Tensor:
        """Log-probability of each token of the texts but the first: float32, by what is served.

        The arithmetic is float32: many CPUs are slow at bf16.
        """
        weights = {name: one.float() for name, one in self.served.named_parameters()}
        found = []
        for text in self.texts:
            tokens = torch.tensor([text])
            told = functional_call(self._model, weights, (), {"input_ids": tokens[:, :-1], "use_cache": False})
            found.append(told.logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).flatten())
        return torch.cat(found)


def told_by(server: Server, texts: Sequence[Sequence[int]]) -> Tensor:
    """As `Learner.logprobs`, by a server."""
    asked = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    answer = server.post("/v1/completions", {"model": "tiny", "prompt": [list(text) for text in texts], **asked})
    answer.raise_for_status()
    found = []
    for text, choice in zip(texts, answer.json()["choices"], strict=True):
        places = zip(text[1:], choice["prompt_logprobs"][1:], strict=True)
        found += [place[str(token)]["logprob"] for token, place in places]
    return torch.tensor(found)
