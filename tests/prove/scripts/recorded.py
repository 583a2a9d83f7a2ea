"""Steps whose records a test knows: of plain SGD, of one with a loss scale, and of LBFGS."""

import torch

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def loss_of(net, step):
    return net(ROWS[8 * step : 8 * step + 8]).square().mean()


net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    if step == 1:
        net[0].weight.requires_grad_(False)
    optimizer.zero_grad()
    loss_of(net, step).backward()
    optimizer.step()

net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
scaler.scale(loss_of(net, 0)).backward()
scaler.step(optimizer)
scaler.update()

net = model()
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)


def closure():
    optimizer.zero_grad()
    loss = loss_of(net, 0)
    loss.backward()
    return loss


optimizer.step(closure)


class Wrapped(torch.optim.SGD):
    """Its step is that of SGD, whose hooks are called too."""

    def step(self, closure=None):
        return super().step(closure)


net = model()
optimizer = Wrapped(net.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    loss_of(net, step).backward()
    optimizer.step()

# optimizers of one step each, until one is at the address of one that is gone
addresses = []
while len(set(addresses)) == len(addresses):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    addresses.append(id(optimizer))
    optimizer.step()
    assert len(addresses) < 1000
