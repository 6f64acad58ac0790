"""`Gate`: a private copy of one layer's router whose linear map can be given other numbers.

Scores, biases, expert groups, corrections and extra arguments stay the family's own code and values; only the weight
[E, H] changes. An adapter widens the map instead of touching the router's scoring: with weight [W | B] on the input
[x ; u] the router computes W x + B u and goes on as ever.

Legend: T tokens, K experts a token, H hidden, E experts, R adapter rank.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import align_module_device
from torch import nn

from moeless.errors import UnsupportedModelError
from moeless.models.probe import ProbedLayer

Scoring = Literal["softmax", "sigmoid"]

_NUM_TRIAL_ROWS = 8


class Gate:
    """See the module's head. The copy stays in eval mode: some routers add noise when they train.

    Raises:
        UnsupportedModelError: the router has no linear map from its input to one logit an expert.
    """

    def __init__(self, point: ProbedLayer) -> None:
        self.point = point
        self.num_experts = point.layer.num_experts
        self.router = _private_copy(point.layer.router)
        self.args: tuple[Any, ...] = point.router_args
        self.kwargs: dict[str, Any] = point.router_kwargs
        self._owner, self._weight_name = self._find_linear()
        self.weight_EH: torch.Tensor = getattr(self._owner, self._weight_name).detach()
        bias = getattr(self._owner, "bias", None)
        self.bias_E: torch.Tensor | None = bias if isinstance(bias, torch.Tensor) else None
        self.reads_input = self._owner is self.router
        """Whether the linear map reads the router's input as it is, not a normalised one."""
        self.scoring: Scoring = "softmax"
        """How the router turns logits into the scores it chooses by, corrections aside."""
        self._examine()
        self.takes_adapter = self.reads_input and self._can_be_widened()
        """Whether `set_weight` may be given more columns than H."""

    @property
    def hidden(self) -> int:
        """H."""
        return self.weight_EH.shape[1]

    @torch.no_grad()
    def route(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Expert ids [T, K] for router inputs [T, H] ([T, H+R] once widened)."""
        return self.point.layer.ids_of(self._call(x_TH), self.point.layer)

    @torch.no_grad()
    def linear_input(self, x_TH: torch.Tensor) -> torch.Tensor:
        """What the linear map reads [T, H] when the router reads `x_TH` [T, H]."""
        if self.reads_input:
            return x_TH
        seen: list[torch.Tensor] = []
        handle = self._owner.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        try:
            self._call(x_TH)
        finally:
            handle.remove()
        return seen[0].reshape(-1, seen[0].shape[-1])

    def logits(self, z_TH: torch.Tensor) -> torch.Tensor:
        """The gate's own logits [T, E] in float32 for inputs of the linear map."""
        bias = None if self.bias_E is None else self.bias_E.float()
        return F.linear(z_TH.float(), self.weight_EH.float(), bias)

    def set_weight(self, weight_EW: torch.Tensor) -> None:
        """Replace the linear map's weight; W is H, or H+R where the gate takes an adapter."""
        like = self.weight_EH
        weight = weight_EW.to(device=like.device, dtype=like.dtype).contiguous()
        setattr(self._owner, self._weight_name, nn.Parameter(weight, requires_grad=False))
        for module, name in ((self.router, "hidden_dim"), (self._owner, "in_features")):
            if hasattr(module, name):
                setattr(module, name, weight.shape[1])

    def to(self, device: torch.device) -> Gate:
        """Move everything the gate computes with; gives itself."""
        self.router.to(device)
        self.weight_EH = self.weight_EH.to(device)
        self.bias_E = None if self.bias_E is None else self.bias_E.to(device)
        self.args = tuple(_moved(a, device) for a in self.args)
        self.kwargs = {name: _moved(a, device) for name, a in self.kwargs.items()}
        return self

    def _call(self, x_TH: torch.Tensor) -> Any:
        return self.router(self.point.as_called(x_TH), *self.args, **self.kwargs)

    def _find_linear(self) -> tuple[nn.Module, str]:
        names = [
            name
            for name, p in self.router.named_parameters()
            if p.dim() == 2 and p.shape[0] == self.num_experts and p.shape[1] > 1 and p.is_floating_point()
        ]
        if len(names) != 1:
            raise UnsupportedModelError(
                f"the router {self.point.layer.router_name} ({type(self.router).__name__}) has {len(names)} weights of "
                f"{self.num_experts} rows where one is needed; its layer cannot have a predictor"
            )
        owner, _, leaf = names[0].rpartition(".")
        return self.router.get_submodule(owner), leaf

    @torch.no_grad()
    def _examine(self) -> None:
        """Run the router on a few rows: is it linear in front, does it score by softmax or sigmoid."""
        generator = torch.Generator().manual_seed(0)
        like = self.weight_EH
        x_TH = torch.randn(_NUM_TRIAL_ROWS, like.shape[1], generator=generator).to(like)
        z_TH = self.linear_input(x_TH)
        self.reads_input = self.reads_input or torch.equal(z_TH.to(x_TH), x_TH)
        logits_TE = self.logits(z_TH)
        output = self._call(x_TH)
        floats = [
            t.float() for t in ([output] if isinstance(output, torch.Tensor) else output) if t.is_floating_point()
        ]
        expected = (logits_TE, logits_TE.softmax(-1))
        wide = [t for t in floats if t.shape == logits_TE.shape]
        tolerance = 1e-4 if like.dtype == torch.float32 else 2e-2
        if not any(torch.allclose(t, e, rtol=tolerance, atol=tolerance) for t in wide for e in expected):
            raise UnsupportedModelError(
                f"the router {self.point.layer.router_name} ({type(self.router).__name__}) does not compute its logits "
                "by one linear map; its layer cannot have a predictor"
            )
        ids_TK = self.point.layer.ids_of(output, self.point.layer)
        weights = [t for t in floats if t.shape == ids_TK.shape and t.shape != logits_TE.shape]
        if weights and ids_TK.shape[1] > 1:
            self.scoring = _scoring(weights[0], logits_TE.gather(1, ids_TK))

    @torch.no_grad()
    def _can_be_widened(self) -> bool:
        """Try one more column of zeros: the ids must stay."""
        like = self.weight_EH
        x_TH = torch.eye(like.shape[1], device=like.device, dtype=like.dtype)[:_NUM_TRIAL_ROWS]
        before = self.route(x_TH)
        try:
            self.set_weight(F.pad(like, (0, 1)))
            return torch.equal(self.route(F.pad(x_TH, (0, 1), value=1.0)), before)
        except (RuntimeError, ValueError):
            return False
        finally:
            self.set_weight(like)


def _private_copy(router: nn.Module) -> nn.Module:
    """A copy that no hook of the model sees, with real weights even where the model's are offloaded."""
    with align_module_device(router):
        private = copy.deepcopy(router)
    remove_hook_from_module(private, recurse=True)
    for module in private.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return private.eval().requires_grad_(False)


def _scoring(weights_TK: torch.Tensor, logits_TK: torch.Tensor) -> Scoring:
    """Ratios of a token's weights tell its score function: normalisation and scale cancel out of them.

    What is neither (PhiMoE's sparsemixer) chooses by the logits themselves and counts as softmax.
    """
    ratio, sigmoid = weights_TK.log().diff(dim=1), F.logsigmoid(logits_TK).diff(dim=1)
    softmax = logits_TK.diff(dim=1)
    fits = torch.allclose(ratio, sigmoid, rtol=0.05, atol=0.05) and not torch.allclose(ratio, softmax, atol=1e-3)
    return "sigmoid" if fits else "softmax"


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
