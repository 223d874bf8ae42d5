"""An agent asks observers to play episodes; for each action they call it back.

A step is one episode of every observer, and what the agent learns from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..library import rpc
from ..program import Program, Step, always

OBSERVERS, EPISODE = 2, 20


class Observer:
    """Has an environment: a point that should stay near zero."""

    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id
        self.chance = torch.Generator().manual_seed(self.id)

    def run_episode(self, agent_rref: Any) -> None:
        state = torch.randn(4, generator=self.chance)
        agent = agent_rref.owner()
        for _ in range(EPISODE):
            action = rpc.rpc_sync(
                agent, select_action, args=(agent_rref, self.id, state)
            )
            push = 0.5 if action else -0.5
            state = 0.9 * state + push * torch.rand(4, generator=self.chance)
            reward = -state.square().sum().item()
            rpc.rpc_sync(agent, report_reward, args=(agent_rref, self.id, reward))


def select_action(agent_rref: Any, observer: int, state: Tensor) -> int:
    return agent_rref.local_value().select_action(observer, state)  # type: ignore[no-any-return]


def report_reward(agent_rref: Any, observer: int, reward: float) -> None:
    agent_rref.local_value().rewards[observer].append(reward)


class Agent:
    """Has the policy, and learns from what the observers went through."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.rref = rpc.RRef(self)
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)
        self.rewards: dict[int, list[float]] = {}
        self.log_probabilities: dict[int, list[Tensor]] = {}
        self.observers = [
            rpc.remote(f"worker{rank}", Observer) for rank in range(1, OBSERVERS + 1)
        ]

    def select_action(self, observer: int, state: Tensor) -> int:
        choice = torch.distributions.Categorical(logits=self.policy(state))
        action = choice.sample()
        self.log_probabilities[observer].append(choice.log_prob(action))
        return int(action)

    def step(self) -> float:
        """Play, learn, and return how many actions were chosen and rewarded."""
        ids = range(1, OBSERVERS + 1)
        self.rewards = {rank: [] for rank in ids}
        self.log_probabilities = {rank: [] for rank in ids}
        futures = [o.rpc_async().run_episode(self.rref) for o in self.observers]
        torch.futures.wait_all(futures)
        self._learn()
        pairs = zip(self.rewards.values(), self.log_probabilities.values(), strict=True)
        return sum(min(len(rewards), len(chosen)) for rewards, chosen in pairs)

    def _learn(self) -> None:
        chosen = [each for one in self.log_probabilities.values() for each in one]
        rewards = torch.tensor([each for one in self.rewards.values() for each in one])
        loss = -(torch.stack(chosen) * (rewards - rewards.mean())).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def _play(rank: int) -> Step:
    return Agent().step


PROGRAMS = [
    Program(
        name="actor–observers that call back",
        goal=3,
        begin=_play,
        servers=OBSERVERS,
        check=always(OBSERVERS * EPISODE),
        steps=30,
        warm_up=5,
    )
]
