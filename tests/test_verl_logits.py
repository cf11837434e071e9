"""Log-probabilities and entropies in the place of verl's: values, gradients, and that verl calls them."""

from collections.abc import Callable

import pytest
import torch

from slurmlight.train.verl import logits as ours

LABELS = torch.arange(23) % 31


def exact_logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, LABELS[:, None]).squeeze(-1)


def exact_entropy(logits: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=logits).entropy()


PAIRS = [(lambda logits: ours.logprobs(logits, LABELS), exact_logprobs), (ours.entropy, exact_entropy)]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 64, ours.CHUNK])
@pytest.mark.parametrize("pair", PAIRS, ids=["logprobs", "entropy"])
def test_values_and_gradients(
    pair: tuple[Callable[[torch.Tensor], torch.Tensor], ...], kind: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, exact = pair
    monkeypatch.setattr(ours, "CHUNK", chunk)
    torch.manual_seed(0)
    logits, weights = (torch.randn(23, 31) * 5).to(kind).requires_grad_(), torch.randn(23)
    found = function(logits)
    (found * weights).sum().backward()
    doubled = logits.detach().double().requires_grad_()
    wanted = exact(doubled)
    (wanted * weights.double()).sum().backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert logits.grad is not None and doubled.grad is not None
    close = 1e-5 if kind is torch.float32 else 1e-2
    torch.testing.assert_close(logits.grad.double(), doubled.grad, rtol=close, atol=close)


def test_batches_of_rows_keep_their_shape() -> None:
    logits, labels = torch.randn(3, 4, 7), torch.randint(7, (3, 4))
    wanted = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    torch.testing.assert_close(ours.logprobs(logits, labels), wanted)
    torch.testing.assert_close(ours.entropy(logits), exact_entropy(logits))


@pytest.mark.stack
def test_verl_calls_them_and_gets_what_its_own_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("verl.utils.torch_functional")
    for name in ("logprobs_from_logits_v2", "entropy_from_logits"):
        monkeypatch.setattr(functional, name, getattr(functional, name))  # put back afterwards
    from slurmlight.train.verl import workers

    logits, labels = torch.randn(9, 11), torch.randint(11, (9,))
    before = functional.logprobs_from_logits(logits, labels), functional.entropy_from_logits(logits)
    workers.setup()
    assert functional.logprobs_from_logits_v2 is ours.logprobs
    assert functional.entropy_from_logits is ours.entropy
    torch.testing.assert_close(functional.logprobs_from_logits(logits, labels), before[0])
    torch.testing.assert_close(functional.entropy_from_logits(logits), before[1])
