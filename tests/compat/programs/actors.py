"""An agent that learns from episodes which observers play with it, action by action."""

import torch
import torch.distributed.rpc as rpc
from programs import start, tell
from torch import nn, optim

OBSERVERS = 2
STEPS = 6


class Observer:
    """Plays episodes in an environment of its own, and asks the agent what to do."""

    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id
        self.generator = torch.Generator().manual_seed(self.id)

    def run_episode(self, agent: rpc.RRef) -> None:
        state = torch.randn(3, generator=self.generator)
        for _ in range(STEPS):
            action = agent.rpc_sync().select_action(self.id, state)
            reward = -float(state.square().sum())
            push = 0.5 if action else -0.5
            state = state * 0.9 + push + 0.1 * torch.randn(3, generator=self.generator)
            rpc.rpc_sync(agent.owner(), report_reward, args=(agent, self.id, reward))


def report_reward(agent: rpc.RRef, observer: int, reward: float) -> None:
    agent.local_value().rewards[observer].append(reward)


class Agent:
    """Has the policy, and learns from what the observers went through."""

    def __init__(self) -> None:
        self.rref = rpc.RRef(self)
        self.policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = optim.Adam(self.policy.parameters(), lr=0.01)
        self.rewards: dict[int, list[float]] = {}
        self.logs: dict[int, list[torch.Tensor]] = {}
        self.observers = [
            rpc.remote(f"observer{n}", Observer) for n in range(1, OBSERVERS + 1)
        ]

    def select_action(self, observer: int, state: torch.Tensor) -> int:
        logits = torch.log_softmax(self.policy(state), 0)
        action = int(logits.argmax())
        self.logs[observer].append(logits[action])
        return action

    def run_episode(self) -> None:
        self.rewards = {n: [] for n in range(1, OBSERVERS + 1)}
        self.logs = {n: [] for n in range(1, OBSERVERS + 1)}
        futures = [
            observer.rpc_async(timeout=0).run_episode(self.rref)
            for observer in self.observers
        ]
        torch.futures.wait_all(futures)

    def learn(self) -> float:
        loss = sum(
            -torch.stack(self.logs[n]).mul(torch.tensor(self.rewards[n])).sum()
            for n in sorted(self.logs)
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss)


def main(rank: int) -> None:
    name = f"observer{rank}" if rank else "agent"
    rpc.init_rpc(name, rank=rank, world_size=OBSERVERS + 1)
    if rank == 0:
        agent = Agent()
        for _ in range(3):
            agent.run_episode()
            tell(agent.learn())
    rpc.shutdown()


if __name__ == "__main__":
    start(main, OBSERVERS + 1)
