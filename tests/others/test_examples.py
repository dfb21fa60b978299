"""The loops of PyTorch's examples: mnist (Adadelta, StepLR, an evaluation each epoch) and dcgan (two networks)."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import same
from tests.others.both import SYNCHRONOUS, attach, both, close, ours, randint, randn, said, settled
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang

RECIPES = [*SYNCHRONOUS[1:], "local_sgd(2)"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


def mnist(ranks: Sequence[int], recipe: str | None) -> list[nn.Module]:
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    comm = attach(model, optimizer, recipe)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(2):
        model.train()
        for batch in range(2):
            number = 10 * epoch + batch
            data, target = randn(ranks, number, 4, 1, 8, 8), randint(ranks, number, 10, 4)
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(randn([7], epoch, 4, 1, 8, 8)).argmax(dim=1, keepdim=True)
        scheduler.step()
    settled(comm, 4)
    comm.detach()
    return [model]


def test_mnist_is_one_process_on_both_ranks_data(gang2: Gang) -> None:
    for together, alone in gang2.run(both, mnist):
        close(together, alone)


@pytest.mark.parametrize("recipe", RECIPES)
def test_mnist_ends_with_equal_models_under_other_recipes(gang2: Gang, recipe: str) -> None:
    (first,), (second,) = gang2.run(ours, mnist, recipe)
    assert same(first, second)
    assert first.isfinite().all()


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(5, 8, 4, 1, 0, bias=False), nn.ReLU(True), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4, 1, 0), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).view(-1, 1).squeeze(1)


def dcgan(ranks: Sequence[int], recipe: str | None, lines: str = "real, G", touch_d: bool = True) -> list[nn.Module]:
    """`lines` are those of docs/others.md; with `touch_d` G's loss leaves gradients in D, as it does in the example."""
    torch.manual_seed(3)
    netG, netD = Generator(), Discriminator()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-5)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-5)
    commD, commG = attach(netD, optimizerD, recipe), attach(netG, optimizerG, recipe)
    criterion = nn.BCELoss()
    for step in range(4):
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = randn(ranks, step, 3, 1, 8, 8)
        label = torch.ones(len(real))
        with commD.no_sync() if "real" in lines else nullcontext():
            errD_real = criterion(netD(real), label)
            errD_real.backward()
        fake = netG(randn(ranks, 100 + step, 3, 5, 1, 1))
        errD_fake = criterion(netD(fake.detach()), label.zero_())
        errD_fake.backward()
        optimizerD.step()
        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        with commD.no_sync() if "G" in lines else nullcontext():
            errG = criterion(netD(fake), label.fill_(1))
            errG.backward(inputs=None if touch_d else list(netG.parameters()))
        optimizerG.step()
    if lines == "real, G":
        settled(commD, 4)
    settled(commG, 4)
    commD.detach()
    commG.detach()
    return [netG, netD]


def test_dcgan_is_one_process_on_both_ranks_data(gang2: Gang) -> None:
    for together, alone in gang2.run(both, dcgan):
        close(together, alone)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_dcgan_throws_away_leaves_no_trace(gang2: Gang, recipe: str) -> None:
    """D's gradients from G's loss: the run is the one, bit for bit, in which there are none."""
    first, second = gang2.run(ours, dcgan, recipe)
    without = gang2.run(ours, dcgan, recipe, "real, G", False)[0]
    for a, b, c in zip(first, second, without, strict=True):
        assert same(a, b)
        assert same(a, c)
        assert a.isfinite().all()


def unchanged(rank: int, size: int, recipe: str, lines: str) -> tuple[list[str], list[Tensor]]:
    finals = list[list[Tensor]]()
    warned = said(lambda: finals.append(ours(rank, size, dcgan, recipe, lines)))
    return warned, finals[0]


@pytest.mark.parametrize(("recipe", "lines"), [("allreduce", ""), ("topk(ratio=0.3)", "real")])
def test_dcgan_without_the_lines_is_told_of_them(gang2: Gang, recipe: str, lines: str) -> None:
    """Not wrong, but D's gradients are sent two or three times a step: for real, for fake, and for G's loss, in vain."""
    wanted = gang2.run(ours, dcgan, recipe)[0]
    for warned, finals in gang2.run(unchanged, recipe, lines):
        assert warned
        assert all("comm.no_sync()" in text for text in warned)
        close(finals, wanted)


def swapped(rank: int, size: int, recipe: str) -> str:
    """The line in the wrong place: what is sent first misses the fake half, and that half would differ between ranks."""
    netD = Discriminator()
    optimizerD = torch.optim.SGD(netD.parameters(), lr=0.1)
    commD = attach(netD, optimizerD, recipe)
    try:
        netD(randn([rank], 1, 3, 1, 8, 8)).sum().backward()
        with commD.no_sync():
            netD(randn([rank], 2, 3, 1, 8, 8)).sum().backward()
        with pytest.raises(AttachError) as caught:
            optimizerD.step()
        return str(caught.value)
    finally:
        commD.detach()


@pytest.mark.parametrize("recipe", ["allreduce", "topk(ratio=0.3)"])
def test_dcgan_with_the_line_around_the_wrong_pass_is_an_error(gang2: Gang, recipe: str) -> None:
    for text in gang2.run(swapped, recipe):
        assert "the last one outside" in text
