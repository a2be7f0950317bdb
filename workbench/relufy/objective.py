"""Gradients of the distillation losses, computed in chunks straight through the output head.

Logits of [tokens, vocabulary] are the largest tensors of a training step by far. Here they exist for one chunk of
tokens at a time, and become the gradients of the hidden states and of the head before the next chunk is begun.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

CHUNK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Bytes of a chunk's float32 logits."""


@dataclass
class Distilled:
    """Gradients of one call: of the student's hidden states [tokens, d_model], of its head's weight [vocab, d_model]
    and bias [vocab] (float32; None where it is not trained or absent); the two losses summed over tokens, or None."""

    hidden: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    kl: torch.Tensor | None
    ce: torch.Tensor | None


@torch.no_grad()
def distil(
    hidden: torch.Tensor,
    head: nn.Linear,
    teacher_hidden: torch.Tensor,
    teacher_head: nn.Linear,
    labels: torch.Tensor,
    *,
    kl: float,
    ce: float,
    compute: torch.dtype,
    value: bool,
    chunk: int | None = None,
) -> Distilled:
    """Gradients of the sum over tokens of kl * KL(teacher || student) + ce * cross-entropy.

    hidden, teacher_hidden: what the heads are given, [tokens, d_model]. labels: the next token's id, int64 [tokens];
    below 0 where there is none. Products are computed in `compute`, the softmax in float32. With `value` the losses
    themselves are computed as well, which costs another third.
    """
    w, wt = head.weight.to(compute), teacher_head.weight.to(compute)
    b = None if head.bias is None else head.bias.to(compute)
    bt = None if teacher_head.bias is None else teacher_head.bias.to(compute)
    h, ht = hidden.to(compute), teacher_hidden.to(compute)
    grad = torch.empty_like(h)
    grad_w = torch.zeros_like(head.weight, dtype=torch.float32) if head.weight.requires_grad else None
    grad_b = None
    if head.bias is not None and head.bias.requires_grad:
        grad_b = torch.zeros_like(head.bias, dtype=torch.float32)
    sums = torch.zeros(2, device=h.device)
    rows = chunk or max(1, CHUNK_BYTES[h.device.type] // (4 * w.shape[0]))
    for at in range(0, len(h), rows):
        part = slice(at, at + rows)
        g = _logit_gradient(
            nn.functional.linear(h[part], w, b), nn.functional.linear(ht[part], wt, bt), labels[part], kl, ce,
            sums if value else None,
        )  # fmt: skip
        if grad_b is not None:
            grad_b += g.sum(0)
        g = g.to(compute)
        torch.mm(g, w, out=grad[part])
        if grad_w is not None:
            grad_w += g.T @ h[part]
    return Distilled(grad.to(hidden.dtype), grad_w, grad_b, sums[0] if value else None, sums[1] if value else None)


def _logit_gradient(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, kl: float, ce: float, sums: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of the losses with respect to the student's logits, float32 [tokens, vocab]; adds to `sums`."""
    known = (labels >= 0).float()
    index = labels.clamp_min(0)[:, None]
    if sums is None:
        p = torch.softmax(student, -1, dtype=torch.float32)
        target = torch.softmax(teacher, -1, dtype=torch.float32)
    else:
        p = torch.log_softmax(student, -1, dtype=torch.float32)
        target = torch.log_softmax(teacher, -1, dtype=torch.float32)
        sums[1] -= (p.gather(1, index)[:, 0] * known).sum()
        q = target.exp()
        sums[0] += target.sub_(p).mul_(q).sum()
        p, target = p.exp_(), q
    if ce:
        p.mul_((kl + ce * known)[:, None]).sub_(target, alpha=kl)
        return p.scatter_add_(1, index, -(ce * known)[:, None])
    return p.sub_(target) if kl == 1 else p.sub_(target).mul_(kl)


@torch.no_grad()
def match(student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over tokens of |student - teacher|^2 / |teacher|^2, float32, and its gradient; [..., d_model] both."""
    scale = teacher.float().square().sum(-1, keepdim=True).clamp_min_(1e-12).reciprocal_()
    away = student.float() - teacher
    grad = away * scale
    return (away.mul_(grad)).sum(), grad.mul_(2).to(student.dtype)
