"""The training objectives of sd-scripts' seven scripts as closed forms in float64, and combinations of its settings.

The formulas stand here for themselves: nothing of the package is used.  ``x`` are clean latents, ``e`` is noise, ``p``
the output of the model; ``a`` is the cumulative product of alphas of the noise schedule, ``s`` the noise level of flow
matching.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

UNET_TIMESTEPS = torch.tensor([0, 1, 250, 500, 998, 999])
SIGMAS = torch.tensor([0.001, 0.12, 0.437, 0.5, 0.873, 1.0], dtype=torch.float64)
SHAPE = (6, 4, 3, 5)


def draw_tensor(frequency: float) -> Tensor:
    """Numbers of about the size of noise, the same with every version of every library."""
    positions = torch.arange(math.prod(SHAPE), dtype=torch.float64).view(SHAPE)
    return 1.4 * torch.sin(frequency * positions + frequency)


LATENTS, NOISE, OUTPUT = draw_tensor(1.1), draw_tensor(2.3), draw_tensor(0.7)


@dataclass(frozen=True)
class Script:
    """What one of sd-scripts' scripts trains, and its defaults."""

    model: str
    module: str = "networks.lora"
    flags: Mapping[str, Any] = field(default_factory=dict)
    """What tells the variant of the model."""
    prediction_type: str | None = None
    """The default of ``model_prediction_type``; None where the script has no such option."""
    is_clean: bool = False
    """Whether estimated clean latents are compared with the clean latents."""
    huber_end: float = 1000
    """The timestep of pure noise that the exponential schedule of the threshold gets."""
    is_flow: bool = True


SCRIPTS: Mapping[str, Script] = {
    "SD 1.5": Script("sd1", is_flow=False),
    "SD 1.5, v": Script("sd1", flags={"v_parameterization": True}, is_flow=False),
    "SD 2.1": Script("sd2", flags={"v2": True, "v_parameterization": True}, is_flow=False),
    "SDXL": Script("sdxl", is_flow=False),
    "SDXL, v": Script("sdxl", flags={"v_parameterization": True}, is_flow=False),
    "SD3": Script("sd3", "networks.lora_sd3", is_clean=True),
    "FLUX.1": Script("flux", "networks.lora_flux", prediction_type="sigma_scaled"),
    "Chroma": Script("chroma", "networks.lora_flux", prediction_type="sigma_scaled"),
    "Lumina": Script("lumina2", "networks.lora_lumina", prediction_type="raw"),
    "HunyuanImage": Script("hunyuan_image", "networks.lora_hunyuan_image", prediction_type="raw"),
    "Anima": Script("anima", "networks.lora_anima", huber_end=1),
}


@dataclass(frozen=True)
class Combination:
    """Settings of one of the scripts, besides those of the model."""

    script: str
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        items = (name if value is True else f"{name} {value}" for name, value in self.settings.items())
        return f"{self.script}: {', '.join(items) or 'defaults'}"

    def get(self, name: str) -> Any:
        """The value of a setting, or the default of all scripts."""
        default = {"loss_type": "l2", "huber_schedule": "snr", "huber_c": 0.1, "huber_scale": 1.0}.get(name)
        return self.settings.get(name, SCRIPTS[self.script].flags.get(name, default))


def compute_objective(combination: Combination) -> tuple[Tensor, Tensor]:
    """The loss of each sample, and the gradient of their sum to what the family's ``predict`` returns."""
    output = OUTPUT.clone().requires_grad_()
    script = SCRIPTS[combination.script]
    losses = _compute_flow_losses(combination, output) if script.is_flow else _compute_unet_losses(combination, output)
    (gradient,) = torch.autograd.grad(losses.sum(), output)
    return losses.detach(), gradient


@cache
def build_schedule(*, has_zero_terminal_snr: bool) -> Tensor:
    """``a`` of each of the 1000 timesteps: square roots of betas evenly spaced; rescaled to end at 0 (2305.08891).

    Both programs hold it in float32, where ``1 - a`` of the first timesteps has lost four digits.
    """
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    if has_zero_terminal_snr:
        root = torch.cumprod(1 - betas, 0).sqrt()
        a = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
        betas = 1 - torch.cat([a[:1], a[1:] / a[:-1]])
    return torch.cumprod(1 - betas, 0).double()


def _compute_unet_losses(combination: Combination, output: Tensor) -> Tensor:
    is_v = bool(combination.get("v_parameterization"))
    a = build_schedule(has_zero_terminal_snr=bool(combination.get("zero_terminal_snr")))[UNET_TIMESTEPS]
    signal, spread = (root.view(-1, 1, 1, 1) for root in (a.sqrt(), (1 - a).sqrt()))
    target = signal * NOISE - spread * LATENTS if is_v else NOISE
    losses = _reduce(_compute_loss(combination, output, target, UNET_TIMESTEPS.double(), ((1 - a) / a).sqrt()))
    before = build_schedule(has_zero_terminal_snr=False)[UNET_TIMESTEPS]  # weights know no zero terminal SNR
    snr = before / (1 - before)
    capped = snr.clamp(max=1000)
    if gamma := combination.get("min_snr_gamma"):
        losses = losses * snr.clamp(max=gamma) / (snr + 1 if is_v else snr)
    if combination.get("scale_v_pred_loss_like_noise_pred"):
        losses = losses * capped / (capped + 1)
    if scale := combination.get("v_pred_like_loss"):
        losses = losses + scale * losses * (capped + 1) / capped
    if combination.get("debiased_estimation_loss"):
        losses = losses / (capped + 1 if is_v else capped.sqrt())
    return losses


def _compute_flow_losses(combination: Combination, output: Tensor) -> Tensor:
    script, s = SCRIPTS[combination.script], SIGMAS.view(-1, 1, 1, 1)
    noisy, target = (1 - s) * LATENTS + s * NOISE, NOISE - LATENTS
    if script.model == "lumina2":  # its model predicts, and its script compares, image minus noise
        output, target = -output, -target
    kind = combination.get("model_prediction_type") or script.prediction_type
    if kind == "additive":
        output = output + noisy
    elif kind == "sigma_scaled":
        output = noisy - s * output
    elif script.is_clean:
        output, target = noisy - s * output, LATENTS
    loss = _compute_loss(combination, output, target, script.huber_end * SIGMAS, None)
    if kind not in ("raw", "additive"):
        loss = loss * {"sigma_sqrt": s**-2, "cosmap": 2 / math.pi / (1 - 2 * s + 2 * s * s)}.get(
            combination.get("weighting_scheme"), torch.ones_like(s)
        )
    return _reduce(loss)


def _compute_loss(
    combination: Combination, output: Tensor, target: Tensor, timesteps: Tensor, noise_to_signal: Tensor | None
) -> Tensor:
    """The loss of each element; ``noise_to_signal`` is None where sd-scripts knows none and stops."""
    difference, kind = output - target, combination.get("loss_type")
    if kind in ("l1", "l2"):
        return difference.abs() if kind == "l1" else difference**2
    c, scale, schedule = (combination.get(f"huber_{name}") for name in ("c", "scale", "schedule"))
    if schedule == "snr":
        if noise_to_signal is None:
            raise NotImplementedError("sd-scripts has no SNR for flow matching")
        threshold = c + (1 - c) / (1 + noise_to_signal) ** 2  # which it does not scale
    else:
        threshold = scale * (torch.full_like(timesteps, c) if schedule == "constant" else c ** (timesteps / 1000))
    threshold = threshold.view(-1, 1, 1, 1)
    smooth = 2 * ((difference**2 + threshold**2).sqrt() - threshold)
    return threshold * smooth if kind == "huber" else smooth


def _reduce(loss: Tensor) -> Tensor:
    return loss.mean((1, 2, 3))


ROBUST = [
    {"loss_type": kind, "huber_schedule": schedule}
    for kind in ("huber", "smooth_l1")
    for schedule in ("constant", "exponential", "snr")
]
EXPONENTIAL = {"loss_type": "huber", "huber_schedule": "exponential"}
HALF = {"huber_scale": 0.5}
ZERO_SNR = {"zero_terminal_snr": True}
V_WEIGHTS = [
    {"min_snr_gamma": 5.0},
    {"min_snr_gamma": 1.0},
    {"scale_v_pred_loss_like_noise_pred": True},
    {"debiased_estimation_loss": True},
    {"min_snr_gamma": 5.0, "scale_v_pred_loss_like_noise_pred": True},
    {"scale_v_pred_loss_like_noise_pred": True, "debiased_estimation_loss": True},
]
NOISE_WEIGHTS = [
    {"min_snr_gamma": 5.0},
    {"min_snr_gamma": 1.0},
    {"debiased_estimation_loss": True},
    {"v_pred_like_loss": 0.1},
    {"min_snr_gamma": 5.0, "debiased_estimation_loss": True},
    {"min_snr_gamma": 5.0, "v_pred_like_loss": 0.1},
]
SCHEMES = [{}, *({"weighting_scheme": name} for name in ("sigma_sqrt", "cosmap", "logit_normal", "mode"))]
KINDS = [{"model_prediction_type": name} for name in ("raw", "additive", "sigma_scaled")]
UNET_SETTINGS: Mapping[str, list[dict[str, Any]]] = {
    "SD 1.5": [{}, {"loss_type": "l1"}, *ROBUST, *({**each, **HALF} for each in ROBUST), *NOISE_WEIGHTS],
    "SD 1.5, v": [
        *({}, {"loss_type": "l1"}, ROBUST[2], ROBUST[4], *V_WEIGHTS),
        *(ZERO_SNR | each for each in ({}, ROBUST[2], ROBUST[2] | HALF, ROBUST[5], *V_WEIGHTS)),
        ZERO_SNR | ROBUST[2] | V_WEIGHTS[0],
    ],
    "SD 2.1": [{}, V_WEIGHTS[0], ZERO_SNR | V_WEIGHTS[0], ZERO_SNR | V_WEIGHTS[3]],
    "SDXL": [{}, ROBUST[2] | HALF, *NOISE_WEIGHTS[:4]],
    "SDXL, v": [{}, ZERO_SNR, *(ZERO_SNR | each for each in V_WEIGHTS[:4])],
}
FLOW_LOSSES = [
    {"loss_type": "l1"},
    ROBUST[0],
    {**EXPONENTIAL, **HALF},
    {"loss_type": "smooth_l1", "huber_schedule": "exponential"},
    {"loss_type": "huber"},
]
FLOW_SETTINGS: Mapping[str, list[dict[str, Any]]] = {
    "FLUX.1": [
        *({}, *SCHEMES[1:]),
        *(kind | scheme for kind, scheme in itertools.product(KINDS[:2], SCHEMES)),
        *(kind | loss for kind, loss in itertools.product(KINDS, FLOW_LOSSES)),
    ],
    "Chroma": [*SCHEMES[:3], KINDS[0] | SCHEMES[1], EXPONENTIAL],
    "Lumina": [*(kind | scheme for kind, scheme in itertools.product(KINDS, SCHEMES[:3])), {}, *FLOW_LOSSES],
    "HunyuanImage": [*(kind | scheme for kind, scheme in itertools.product(KINDS, SCHEMES[:3])), {}, *FLOW_LOSSES],
    "SD3": [*SCHEMES, *(scheme | loss for scheme, loss in itertools.product(SCHEMES[:2], FLOW_LOSSES))],
    "Anima": [*SCHEMES, *(scheme | loss for scheme, loss in itertools.product(SCHEMES[:2], FLOW_LOSSES))],
}


def list_combinations() -> Iterator[Combination]:
    """All combinations that are compared."""
    for script, combinations in {**UNET_SETTINGS, **FLOW_SETTINGS}.items():
        yield from (Combination(script, settings) for settings in combinations)
    yield Combination("SD 1.5", ZERO_SNR)
