"""The log-probabilities that take the place of verl's loop over tokens: values, gradients, and that verl calls them."""

import pytest
import torch

from slurmlight.train.verl import logprobs


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 64, logprobs.CHUNK])
def test_values_and_gradients_are_those_of_a_log_softmax(kind, chunk, monkeypatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    torch.manual_seed(0)
    logits = (torch.randn(23, 31) * 5).to(kind).requires_grad_()
    labels, weights = torch.randint(31, (23,)), torch.randn(23)
    found = logprobs.logprobs(logits, labels)
    (found * weights).sum().backward()
    exact = logits.detach().double().requires_grad_()
    wanted = exact.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    (wanted * weights.double()).sum().backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert logits.grad is not None and exact.grad is not None
    close = 1e-5 if kind is torch.float32 else 1e-2
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=close, atol=close)


def test_batches_of_rows_keep_their_shape() -> None:
    logits, labels = torch.randn(3, 4, 7), torch.randint(7, (3, 4))
    wanted = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    torch.testing.assert_close(logprobs.logprobs(logits, labels), wanted)


@pytest.mark.stack
def test_verl_calls_them_in_every_worker(monkeypatch) -> None:
    """And gives with them what its own loop gives."""
    functional = pytest.importorskip("verl.utils.torch_functional")
    monkeypatch.setattr(functional, "logprobs_from_logits_v2", functional.logprobs_from_logits_v2)  # put back afterwards
    from slurmlight.train.verl import workers

    logits, labels = torch.randn(9, 11).bfloat16(), torch.randint(11, (9,))
    before = functional.logprobs_from_logits(logits, labels)
    workers.setup()
    assert functional.logprobs_from_logits_v2 is logprobs.logprobs
    torch.testing.assert_close(functional.logprobs_from_logits(logits, labels), before.float(), rtol=2e-2, atol=2e-2)
