"""What the loss of a flow-matching model compares: the values of ``model_prediction_type``.

The letters follow process.py: noisy latents ``x_s = (1 - s) x_0 + s e``, target ``e - x_0``.  ``raw`` compares the
prediction with the target.  ``additive`` and ``sigma_scaled`` are those of sd-scripts, which compare another quantity
with the same target; ``x0`` compares estimated with true clean latents, as sd-scripts does for SD3.

To add one: write ``(prediction, target, noisy_latents, sigmas) -> (prediction, target)``, list it in
``MODEL_PREDICTION_TYPES``, and add its name to the choices of ``model_prediction_type`` in
``config/schema_objective.py``.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from .process import expand_like

PredictionTransform = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of prediction, target, noisy latents and sigmas (B, 1, ...) that returns what is compared.

All are float32.  For a model that predicts ``x_0 - e`` itself the noisy latents have the opposite sign, as sd-scripts
adds them to the prediction of the model itself.
"""


def compare_additive(
    prediction: Tensor, target: Tensor, noisy_latents: Tensor, sigmas: Tensor
) -> tuple[Tensor, Tensor]:
    """The prediction plus the noisy latents, with ``e - x_0``."""
    return prediction + noisy_latents, target


def compare_sigma_scaled(
    prediction: Tensor, target: Tensor, noisy_latents: Tensor, sigmas: Tensor
) -> tuple[Tensor, Tensor]:
    """The estimate ``x_s - s v`` of the clean latents, with ``e - x_0``."""
    return noisy_latents - sigmas * prediction, target


def compare_clean_latents(
    prediction: Tensor, target: Tensor, noisy_latents: Tensor, sigmas: Tensor
) -> tuple[Tensor, Tensor]:
    """The estimate of the clean latents with the clean latents, which differ by ``s`` times the error of ``raw``.

    Scaling both sides of ``raw`` loses no digits where ``s`` is small, unlike the difference of the estimate.
    """
    return sigmas * prediction, sigmas * target


MODEL_PREDICTION_TYPES: Mapping[str, PredictionTransform] = {
    "additive": compare_additive,
    "sigma_scaled": compare_sigma_scaled,
    "x0": compare_clean_latents,
}
"""What is compared for each value of ``model_prediction_type`` but ``raw``."""


def select_compared_tensors(
    prediction: Tensor, target: Tensor, noisy_latents: Tensor, sigmas: Tensor, *, name: str, velocity_sign: int = 1
) -> tuple[Tensor, Tensor]:
    """Return what the loss compares with ``model_prediction_type`` ``name``: a prediction and its target, in float32.

    ``sigmas`` (B,) are the noise levels of the samples.
    """
    prediction, target = prediction.float(), target.float()
    transform = MODEL_PREDICTION_TYPES.get(name)
    if transform is None:
        return prediction, target
    return transform(prediction, target, velocity_sign * noisy_latents.float(), expand_like(sigmas, prediction))
