"""Actors and a learner: several workers play, one learns from their episodes.

    gradwire launch -n 3 examples/actor_learner.py

The game: a ball falls through a grid, and a paddle below has to catch it. Each actor gets the
latest policy from the learner, plays some games, and sends back the episodes. The learner improves
the policy with each response (REINFORCE).
"""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import gradwire as gw

WIDTH, HEIGHT = 5, 6
GAMES = 64
ROUNDS = 60


class Catch:
    """Many games at once. A move is 0, 1 or 2: to the left, stay, to the right."""

    def __init__(self) -> None:
        self.ball = torch.randint(0, WIDTH, (GAMES,))
        self.paddle = torch.randint(0, WIDTH, (GAMES,))
        self.height = HEIGHT

    def look(self) -> Tensor:
        """What the player sees: where ball and paddle are, and how high the ball is."""
        places = torch.eye(WIDTH)
        height = torch.full((GAMES, 1), self.height / HEIGHT)
        return torch.cat([places[self.ball], places[self.paddle], height], 1)

    def move(self, moves: Tensor) -> bool:
        """Move the paddles; whether the games are over."""
        self.paddle = (self.paddle + moves - 1).clamp(0, WIDTH - 1)
        self.height -= 1
        return self.height == 0

    def rewards(self) -> Tensor:
        return (self.ball == self.paddle).float()


def new_policy() -> nn.Module:
    return nn.Sequential(nn.Linear(2 * WIDTH + 1, 32), nn.ReLU(), nn.Linear(32, 3))


def play(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Runs on an actor: what it saw and did, and what it got for it."""
    policy = new_policy()
    policy.load_state_dict(weights)
    game, seen, done = Catch(), [], []
    over = False
    with torch.no_grad():
        while not over:
            seen.append(game.look())
            done.append(Categorical(logits=policy(seen[-1])).sample())
            over = game.move(done[-1])
    return torch.stack(seen), torch.stack(done), game.rewards()


def learn(
    policy: nn.Module, optimizer: torch.optim.Optimizer, told: tuple[Tensor, ...]
) -> float:
    """Make more likely what went better than usual; how much was caught."""
    seen, done, rewards = told
    chosen = Categorical(logits=policy(seen)).log_prob(done).sum(0)
    loss = -(chosen * (rewards - rewards.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return rewards.mean().item()


def main() -> None:
    torch.manual_seed(0)
    actors = [info.name for info in gw.get_worker_infos() if info.name != "worker0"]
    policy = new_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    asked = {a: gw.rpc_async(a, play, args=(policy.state_dict(),)) for a in actors}
    caught = []
    for number in range(ROUNDS):
        for actor in actors:
            caught.append(learn(policy, optimizer, asked[actor].wait()))
            asked[actor] = gw.rpc_async(actor, play, args=(policy.state_dict(),))
        if number % 20 == 19:
            recent = sum(caught[-10:]) / 10
            print(f"round {number + 1}: {recent:.0%} of the balls caught")
    for last in asked.values():
        last.wait()
    print(f"from {sum(caught[:4]) / 4:.0%} to {sum(caught[-10:]) / 10:.0%}")


if __name__ == "__main__":
    with gw.init_rpc() as worker:
        torch.manual_seed(worker.id)
        if worker.id == 0:
            main()
